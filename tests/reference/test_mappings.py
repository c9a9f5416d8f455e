"""Collectives over lists: what each is made of. f and g, and sequence parallelism's pair: adjoint, conjugate, and what
they keep is enough.
"""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.comm.collectives import all_gather, all_reduce, broadcast, gather, reduce, reduce_scatter, scatter
from reference.comm.regions import SEQUENCE, TENSOR_PARALLEL, SequenceParallelRegion
from tests.cases import close, random_numbers

RANKS, SEEDS, COUNT, EXACT = st.integers(1, 9), st.integers(0, 2**32 - 1), st.integers(1, 3), st.booleans()
SPLIT, KEPT = SequenceParallelRegion(), SequenceParallelRegion(keep_gathered_inputs=True)
REGIONS = pytest.mark.parametrize("region", [TENSOR_PARALLEL, SPLIT, KEPT],
                                  ids=["f and g", "gather again", "keep gathered"])


# ---- collectives ----------------------------------------------------------------------------------------------------


def per_rank(t, seed, *shape):
    return list(np.random.default_rng(seed).normal(size=(t, *shape)))


@given(RANKS, st.integers(0, 1), SEEDS)
def test_an_all_reduce_is_a_reduce_scatter_then_an_all_gather(t, axis, seed):
    xs = per_rank(t, seed, 2 * t, 3 * t)
    for total, again, highest in zip(all_reduce(xs), all_gather(reduce_scatter(xs, axis), axis),
                                     all_reduce(xs, np.maximum), strict=True):
        close(total, np.sum(xs, 0))
        assert (total == again).all() and (highest == np.max(xs, 0)).all()


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


# ---- regions --------------------------------------------------------------------------------------------------------


def inside(t, n, seed, exact=False):
    """Draw each rank's own array in the region, [b, s, h]. t divides s."""
    return list(random_numbers(seed, "inside", (t, 2, n * t, 3), exact))


def outside(region, t, n, seed, exact=False):
    """Draw each rank's array outside the region: [b, s, h], identical on all, or its positions [b, s/t, h]."""
    x = random_numbers(seed, "outside", (2, n * t, 3), exact)
    return [x] * t if region is TENSOR_PARALLEL else np.split(x, t, SEQUENCE)


def inner_inside(xs, ys):
    """Return the inner product of all ranks' arrays together: each rank has its own."""
    return np.stack([sum((x * y).sum() for x, y in zip(xs, ys, strict=True))])


def inner_outside(region, xs, ys):
    """Return the inner product outside the region, where arrays that are identical on all ranks count once."""
    return inner_inside(xs[:1], ys[:1]) if region is TENSOR_PARALLEL else inner_inside(xs, ys)


@REGIONS
@given(RANKS, COUNT, SEEDS, EXACT)
def test_a_pair_is_adjoint_and_conjugate(region, t, n, seed, exact):
    """<enter(x), y> = <x, enter_backward(y)> for all x outside and y inside, and likewise for leaving. The backward of
    one is the forward of the other, to the last bit.
    """
    x, y = outside(region, t, n, seed, exact), inside(t, n, seed, exact)
    close(inner_inside(region.enter(x), y), inner_outside(region, x, region.enter_backward(y)))
    close(inner_outside(region, region.leave(y), x), inner_inside(y, region.leave_backward(x)))
    alike(region.enter(x), region.leave_backward(x))
    alike(region.leave(y), region.enter_backward(y))


@REGIONS
@given(RANKS, COUNT, SEEDS)
def test_the_backward_recovers_the_entered_input(region, t, n, seed):
    """The input is kept whole, or, by default, 1/t of it is kept and gathered once more."""
    x = outside(region, t, n, seed)
    entered = region.enter(x)
    kept = region.keep(x, entered)
    alike(region.enter_again(kept), entered)
    assert [y.size for y in kept] == [y.size // (t if region is SPLIT else 1) for y in entered]


def alike(xs, ys):
    """Assert that every rank has the same numbers in both lists."""
    assert all(x.shape == y.shape and (x == y).all() for x, y in zip(xs, ys, strict=True))
