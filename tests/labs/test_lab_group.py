"""The group of an answer: its collectives are NumPy's, a send waits for its receiver, and what is sent is counted."""
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from grading.lab_group import DTYPES, OPERATIONS, LabGroup
from mpi_impl.launching.pool import RankFailure

RANKS = st.integers(1, 8)
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)


def call(group, allowed, operation, args):
    """Perform one operation. Return its result, the number of elements sent, whether the arguments are unchanged, and
    the messages that wait.
    """
    mine = LabGroup(group, allowed)
    before = [np.copy(value) for value in args[group.rank]]
    result = getattr(mine, operation)(*args[group.rank])
    kept = all(np.array_equal(a, b) for a, b in zip(before, args[group.rank]))
    return result, mine.sent, kept, mine.waiting


def random(n, shape, dtype="float64", seed=0):
    """Draw an array for each rank, with sums that are exact."""
    draw = np.random.default_rng([seed, n, *shape]).integers(-50, 50, (n, *shape))
    return list(draw.astype(dtype))


@given(RANKS, SHAPES, st.sampled_from(DTYPES[:-1]), st.sampled_from(["sum", "max"]))
@settings(max_examples=40)
def test_all_reduce_is_numpys(ranks, n, shape, dtype, op):
    xs = random(n, shape, dtype)
    right = np.sum(xs, 0) if op == "sum" else np.max(xs, 0)
    for result, sent, kept, _ in ranks.run(n, call, OPERATIONS, "all_reduce", [[x, op] for x in xs]):
        assert np.array_equal(result, right) and result.dtype == dtype and kept
        assert sent == 2 * xs[0].size * (n - 1) // n


@given(RANKS, st.integers(0, 2), st.data())
@settings(max_examples=40)
def test_all_gather_joins_what_may_differ_in_length(ranks, n, axis, data):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    shapes = [(2,) * axis + (length,) + (3,) * (2 - axis) for length in lengths]
    xs = [random(1, shape, seed=rank)[0] for rank, shape in enumerate(shapes)]
    for result, sent, *_ in ranks.run(n, call, OPERATIONS, "all_gather", [[x, axis] for x in xs]):
        assert np.array_equal(result, np.concatenate(xs, axis))
        assert sent == sum(x.size for x in xs) * (n - 1) // n


@given(RANKS, st.integers(0, 11), st.integers(0, 1))
@settings(max_examples=40)
def test_reduce_scatter_gives_the_piece_of_array_split(ranks, n, length, axis):
    xs = random(n, (length, 3) if axis == 0 else (3, length))
    found = ranks.run(n, call, OPERATIONS, "reduce_scatter", [[x, axis] for x in xs])
    for (result, sent, *_), right in zip(found, np.array_split(sum(xs), n, axis)):
        assert np.array_equal(result, right) and sent == xs[0].size * (n - 1) // n


def around(group, shape, dtype, shift):
    mine = LabGroup(group, ["exchange"])
    x = np.full(shape, group.rank).astype(dtype)
    return mine.exchange(x, (mine.rank + shift) % mine.size, (mine.rank - shift) % mine.size), mine.sent


@given(RANKS, st.lists(st.integers(0, 6), max_size=6).map(tuple), st.sampled_from(DTYPES), st.integers(0, 8))
@settings(max_examples=60)
def test_what_is_exchanged_arrives_in_shape_and_kind(ranks, n, shape, dtype, shift):
    """Whatever its shape, to any rank, oneself included; to oneself it counts for nothing."""
    for rank, (got, sent) in enumerate(ranks.run(n, around, shape, dtype, shift)):
        assert np.array_equal(got, np.full(shape, (rank - shift) % n).astype(dtype))
        assert got.shape == shape and got.dtype == dtype
        assert sent == (int(np.prod(shape)) if shift % n else 0)


def slow_receiver(group, elements):
    """Return how long a rank is busy: rank 0 sends, and rank 1 receives later."""
    mine = LabGroup(group, OPERATIONS)
    mine.barrier()
    start = time.monotonic()
    if mine.rank == 0:
        mine.send(np.zeros(elements), 1)
    else:
        time.sleep(0.4)
        mine.receive(0)
    return time.monotonic() - start


@pytest.mark.parametrize("elements", [0, 1, 100_000])
def test_a_send_waits_for_its_receiver_however_small_it_is(ranks, elements):
    assert ranks.run(2, slow_receiver, elements)[0] > 0.35


def all_send_first(group):
    mine = LabGroup(group, OPERATIONS)
    mine.send(np.zeros(0), (mine.rank + 1) % mine.size)
    return mine.receive((mine.rank - 1) % mine.size)


def test_so_a_circle_of_sends_hangs(ranks):
    with pytest.raises(RankFailure, match="stuck"):
        ranks.run(3, all_send_first, timeout=1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_not_allowed_is_reported(ranks, operation):
    allowed = [name for name in OPERATIONS if name != operation]
    args = {"send": [1, 0], "receive": [0], "exchange": [1, 0, 0], "barrier": []}.get(operation, [np.ones(2)])
    with pytest.raises(RankFailure,
                       match=rf"group\.{operation} may not be used here\. This task allows: {allowed[0]}, "):
        ranks.run(1, call, allowed, operation, [args])


@pytest.mark.parametrize("operation, args, words", [
    ("send", [np.ones(2), 0], "with itself, and wait for ever"), ("receive", [0], "with itself"),
    ("send", [np.ones(2), 1], "there is no rank 1"), ("receive", [-1], "there is no rank -1"),
    ("exchange", [np.ones(2), 0, 0.5], "there is no rank 0.5"), ("send", [np.ones(2), "0"], "there is no rank 0"),
    ("exchange", ["text", 0, 0], "cannot be sent"), ("exchange", [np.ones(2, complex), 0, 0], "cannot be sent"),
    ("exchange", [[[1], [1, 2]], 0, 0], "inhomogeneous"), ("exchange", [np.ones((1,) * 7), 0, 0], "cannot be sent"),
    ("all_reduce", [[None]], "cannot be sent"), ("all_gather", [np.ones(2, "float16")], "cannot be sent"),
])
def test_what_cannot_be_done_is_reported(ranks, operation, args, words):
    with pytest.raises(RankFailure, match=words):
        ranks.run(1, call, OPERATIONS, operation, [args])


def set_attribute(group, name, value):
    setattr(LabGroup(group, OPERATIONS), name, value)


@pytest.mark.parametrize("name", ["sent", "rank", "size", "waiting", "send", "_allowed"])
def test_an_answer_cannot_set_what_is_counted(ranks, name):
    with pytest.raises(RankFailure, match=f"group.{name} cannot be set"):
        ranks.run(1, set_attribute, name, 0)
