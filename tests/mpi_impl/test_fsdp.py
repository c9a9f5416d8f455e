"""FSDP on ranks trains any list of layers as one process does, whichever way it is sharded."""
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from mpi_impl.training.fsdp import STRATEGIES, size_based
from tests.fsdp_theorems import Wrapping, fsdp_trains_as_one_process, layers_of, sent_and_kept

SLIDES = (8, 4, 16, 4)
PSI = 8 * 4 + 4 + 4 * 16 + 16 + 16 * 4 + 4


@st.composite
def wrappings(draw, d):
    """Draw a model, its units, and a strategy for d ranks."""
    sizes = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)))
    cuts = tuple(sorted({0, 2 * (len(sizes) - 1), *draw(st.sets(st.integers(1, 2 * len(sizes) - 3)))}))
    strategy = draw(st.sampled_from([one for one in STRATEGIES if d > 1 or one != "HYBRID_SHARD"]))
    instances = draw(st.sampled_from([n for n in range(2, d + 1) if d % n == 0])) if "HYBRID" in strategy else 1
    return Wrapping(sizes, cuts, strategy, instances, strategy != "NO_SHARD" and draw(st.booleans()))


@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 2), st.integers(0, 2**32 - 1), st.data())
def test_every_strategy_trains_as_one_process(ranks, d, microbatches, seed, data):
    """In all ways, with ragged buffers, units without parameters, and Adam whose gradient is clipped."""
    ranks.run(d, fsdp_trains_as_one_process, data.draw(wrappings(d)), microbatches, seed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_network_of_the_slides_trains_on_four_ranks(ranks, strategy):
    wrapping = Wrapping(SLIDES, (0, 2, 4, 6), strategy, 2 if "HYBRID" in strategy else 1, strategy != "NO_SHARD")
    ranks.run(4, fsdp_trains_as_one_process, wrapping, 2, 0)


@pytest.mark.parametrize("strategy, instances, sent, kept", [
    ("NO_SHARD", 1, 2 * PSI * 3 / 4, 2 * PSI), ("SHARD_GRAD_OP", 1, 2 * PSI * 3 / 4, 2 * PSI / 4),
    ("FULL_SHARD", 1, 3 * PSI * 3 / 4, 2 * PSI / 4),
    ("HYBRID_SHARD", 2, 3 * PSI / 2 + 2 * PSI / 2 / 2, 2 * PSI / 2)])
def test_what_a_rank_sends_and_keeps(ranks, strategy, instances, sent, kept):
    """The slides' three layers on 4 ranks, a unit for each: as the textbook's wrapper counts."""
    wrapping = Wrapping(SLIDES, (0, 2, 4, 6), strategy, instances)
    assert ranks.run(4, sent_and_kept, wrapping) == [(sent, kept)] * 4


@example([1, 1, 1], 2)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(1, 100))
def test_units_are_as_small_as_the_policy_allows(sizes, least):
    layers = layers_of(Wrapping(tuple(sizes), ()), np.random.default_rng(0))
    units = size_based(least)(layers)
    weights = [[sum(x.size for x in layer.params.values()) for layer in unit] for unit in units]
    assert [layer for unit in units for layer in unit] == layers
    assert len(units) == 1 or min(map(sum, weights)) >= least
    for unit in weights[:-1]:
        assert sum(unit[:-2]) < least       # the last two are a linear layer, and a tanh without parameters
