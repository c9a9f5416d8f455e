"""The numbers and claims behind the walkthroughs' pictures. (Their looks are not tested; a run draws all.)"""

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from mpi_impl.runtime.arrays import dtype_of
from reference.comm.ring import ring_all_reduce as pieces_sent
from reference.positions import in_order, work_of_ranks, zigzag
from reference.precision import FORMATS
from reference.schedules.generators import SCHEDULES, make, takes_v
from reference.schedules.simulate import activations_in_flight
from shardlab.notebook.pictures.formats import numbers_between
from shardlab.notebook.pictures.pipelines import held, play
from shardlab.notebook.pictures.positions import ring_steps, score_owners
from shardlab.notebook.pictures.ring import ring_all_reduce
from shardlab.notebook.pictures.shards import stretches

# ---- who owns what --------------------------------------------------------------------------------------------------


@given(owners=st.integers(1, 5).flatmap(lambda n: st.lists(
    st.lists(st.integers(-1, 3), min_size=n, max_size=n), min_size=1, max_size=5)))
def test_stretches_tile_a_matrix_and_have_one_owner_each(owners):
    owners = np.array(owners)
    times = np.zeros(owners.shape, int)
    for r, c, n, m in stretches(owners):
        times[r:r + n, c:c + m] += 1
        assert len(np.unique(owners[r:r + n, c:c + m])) == 1
    assert (times == 1).all()


# ---- what moves -----------------------------------------------------------------------------------------------------


@given(st.integers(2, 7))
def test_a_ring_adds_up(t):
    """The power of 2 of each rank and piece shows whose numbers are in a sum."""
    xs = 2**np.arange(t * t).reshape(t, t)
    total, steps = xs.sum(0), ring_all_reduce(xs)
    assert (steps[0].held == xs).all() and (steps[-1].held == total).all()
    assert ((steps[t - 1].held == total) == np.eye(t, dtype=bool)).all(), "the reduce-scatter: rank i has piece i"
    assert len(steps) - 1 == pieces_sent(t, t)
    for before, after in zip(steps, steps[1:]):
        changed = set(zip(*np.nonzero(before.held != after.held)))
        assert changed == {((rank + 1) % t, piece) for rank, piece in enumerate(after.sent)}, "only what arrives"


@pytest.mark.parametrize("deal", [in_order, zigzag])
def test_scores_are_computed_by_the_querys_rank_in_the_step_that_brings_the_key(deal):
    c = 3
    chunks = deal(c, 4 * c)
    owners, steps = score_owners(chunks), ring_steps(chunks)
    assert [int((owners == rank).sum()) for rank in range(c)] == work_of_ranks(chunks)
    holder = {i: rank for rank, own in enumerate(chunks) for chunk in own for i in range(chunk.start, chunk.stop)}
    for query, key in np.ndindex(owners.shape):
        visible = key <= query
        assert owners[query, key] == (holder[query] if visible else -1)
        assert steps[query, key] == ((holder[query] - holder[key]) % c if visible else -1)


@st.composite
def training_schedules(draw):
    training = [name for name in SCHEDULES if name != "forward-only"]
    name, p = draw(st.sampled_from(training)), draw(st.integers(1, 5))
    m = p * draw(st.integers(1, 3)) if name == "interleaved" else draw(st.integers(1, 9))
    return make(name, p, m, draw(st.integers(1, 3)) if takes_v(name) else None)


@given(training_schedules())
@example(make("interleaved", 2, 4, 2))
def test_a_rank_holds_at_most_what_is_in_flight_and_works_as_long_with_any_number_of_stages(schedule):
    timeline = play(schedule)
    assert timeline.work == pytest.approx(3 * schedule.microbatches)
    for spans, most in zip(timeline.ranks, activations_in_flight(schedule)):
        times, counts = held(spans)
        assert times == sorted(set(times)) and max(counts) == most and min(counts) >= 0 and counts[-1] == 0


# ---- numbers of a format --------------------------------------------------------------------------------------------

HALVES = [FORMATS["float16"], FORMATS["bfloat16"]]


@pytest.mark.parametrize("form, start, stop", [(HALVES[0], 63_000.0, 68_000.0), (HALVES[1], -0.01, 0.0)])
def test_the_numbers_between_are_those_of_the_dtype(form, start, stop):
    """Of all 65,536, those between, but for some that lie too close to be told apart."""
    with np.errstate(invalid="ignore"):
        everything = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(form.name)).astype(np.float64)
    everything = np.unique(everything[(everything >= start) & (everything <= stop)])
    found, apart = set(numbers_between(form, start, stop)), (stop - start) / 2000
    gaps = np.diff(everything, prepend=-np.inf, append=np.inf)
    assert set(everything[(gaps[:-1] > apart) & (gaps[1:] > apart)]) <= found <= set(everything)
