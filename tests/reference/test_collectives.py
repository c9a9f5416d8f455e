"""Collectives over lists: what each means, and what one is made of. For f and g see test_mappings.py."""
import numpy as np
from hypothesis import given, strategies as st

from reference.comm.collectives import all_gather, all_reduce, broadcast, gather, reduce, reduce_scatter, scatter
from tests.strategies import close

RANKS, SEEDS = st.integers(1, 9), st.integers(0, 2**32 - 1)


def per_rank(t, seed, *shape):
    return list(np.random.default_rng(seed).normal(size=(t, *shape)))


@given(RANKS, st.integers(0, 1), SEEDS)
def test_an_all_reduce_is_a_reduce_scatter_then_an_all_gather(t, axis, seed):
    xs = per_rank(t, seed, 2 * t, 3 * t)
    for total, again in zip(all_reduce(xs), all_gather(reduce_scatter(xs, axis), axis), strict=True):
        close(total, np.sum(xs, 0))
        assert (total == again).all()


@given(RANKS, st.integers(0, 1), SEEDS, st.data())
def test_one_rank_in_the_middle_does_what_all_do_together(t, axis, seed, data):
    """A reduce, then a scatter is a reduce-scatter; a gather, then a broadcast is an all-gather. The root has it all.
    """
    xs, root = per_rank(t, seed, 2 * t, 3 * t), data.draw(st.integers(0, t - 1))
    summed, gathered = reduce(xs, root), gather(xs, axis, root)
    assert [x is None for x in summed] == [x is None for x in gathered] == [rank != root for rank in range(t)]
    for found, expected in zip(scatter(summed, axis, root), reduce_scatter(xs, axis), strict=True):
        assert (found == expected).all()
    for found, expected in zip(broadcast(gathered, root), all_gather(xs, axis), strict=True):
        assert (found == expected).all()


@given(RANKS, SEEDS)
def test_maximum_and_broadcast(t, seed):
    xs = per_rank(t, seed, 3)
    assert all((x == np.max(xs, 0)).all() for x in all_reduce(xs, np.maximum))
    assert all((x == xs[t - 1]).all() for x in broadcast(xs, t - 1))
