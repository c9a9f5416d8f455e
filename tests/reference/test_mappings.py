"""f and g, and sequence parallelism's pair: adjoint, conjugate, and what they keep is enough."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.comm.collectives import all_reduce
from reference.comm.mappings import SEQUENCE, TENSOR_PARALLEL, SequenceParallelRegion
from reference.params import Tensor
from tests.strategies import close

RANKS, SEEDS = st.integers(1, 9), st.integers(0, 2**32 - 1)
SPLIT = [SequenceParallelRegion(), SequenceParallelRegion(keep_gathered_inputs=True)]
REGIONS = pytest.mark.parametrize("region", [TENSOR_PARALLEL, *SPLIT], ids=["f and g", "gather again", "keep gathered"])


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def inside(t, n, seed):
    """Draw each rank's own array in the region, [b, s, h]. t divides s."""
    return list(draw([seed, 0], t, 2, n * t, 3))


def outside(region, t, n, seed):
    """Draw each rank's array outside the region: [b, s, h], identical on all, or its positions [b, s/t, h]."""
    x = draw([seed, 1], 2, n * t, 3)
    return [x] * t if region is TENSOR_PARALLEL else np.split(x, t, SEQUENCE)


def inner_inside(xs, ys):
    """Return the inner product of all ranks' arrays together: each rank has its own."""
    return sum((x * y).sum() for x, y in zip(xs, ys, strict=True))


def inner_outside(region, xs, ys):
    """Return the inner product outside the region, where arrays that are identical on all ranks count once."""
    return inner_inside(xs[:1], ys[:1]) if region is TENSOR_PARALLEL else inner_inside(xs, ys)


@REGIONS
@given(RANKS, st.integers(1, 3), SEEDS)
def test_entering_and_its_backward_are_adjoint(region, t, n, seed):
    """<enter(x), y> = <x, enter_backward(y)> for all x outside and y inside."""
    x, y = outside(region, t, n, seed), inside(t, n, seed)
    close(np.stack([inner_inside(region.enter(x), y)]), np.stack([inner_outside(region, x, region.enter_backward(y))]))


@REGIONS
@given(RANKS, st.integers(1, 3), SEEDS)
def test_leaving_and_its_backward_are_adjoint(region, t, n, seed):
    """<leave(x), y> = <x, leave_backward(y)> for all x inside and y outside."""
    x, y = inside(t, n, seed), outside(region, t, n, seed)
    close(np.stack([inner_outside(region, region.leave(x), y)]), np.stack([inner_inside(x, region.leave_backward(y))]))


@REGIONS
@given(RANKS, st.integers(1, 3), SEEDS)
def test_the_backward_of_one_is_the_forward_of_the_other(region, t, n, seed):
    """The operators of a pair are conjugate as linear maps, to the last bit."""
    x, partial = outside(region, t, n, seed), inside(t, n, seed)
    alike(region.enter(x), region.leave_backward(x))
    alike(region.leave(partial), region.enter_backward(partial))


@REGIONS
@given(RANKS, st.integers(1, 3), SEEDS)
def test_the_backward_recovers_the_entered_input(region, t, n, seed):
    """The input is kept whole, or, by default, 1/t of it is kept and gathered once more."""
    x = outside(region, t, n, seed)
    entered = region.enter(x)
    kept = region.keep(x, entered)
    alike(region.enter_again(kept), entered)
    lean = region is SPLIT[0]
    assert [y.size for y in kept] == [y.size // (t if lean else 1) for y in entered]


@given(RANKS, st.integers(1, 3), SEEDS)
def test_both_regions_compute_the_same(t, n, seed):
    """Inside is x, whichever rank holds it; outside is the sum, of which a rank has all or its own positions."""
    cut, x, partial = SPLIT[0], outside(TENSOR_PARALLEL, t, n, seed), inside(t, n, seed)
    alike(cut.enter(np.split(x[0], t, SEQUENCE)), TENSOR_PARALLEL.enter(x))
    assert (np.concatenate(cut.leave(partial), SEQUENCE) == TENSOR_PARALLEL.leave(partial)[0]).all()


@REGIONS
@given(RANKS, st.integers(1, 3), SEEDS)
def test_positions_are_those_that_a_rank_holds(region, t, n, seed):
    """A slice of the whole at these positions is the rank's array."""
    x = outside(region, t, n, seed)
    whole = x[0] if region is TENSOR_PARALLEL else np.concatenate(x, SEQUENCE)
    alike([whole[:, positions] for positions in region.positions(x)], x)


@REGIONS
@given(RANKS, SEEDS)
def test_gradients_of_replicated_tensors_alone_are_completed(region, t, seed):
    """With sequence parallelism they are partial, and are summed; gradients of sharded tensors are complete already."""
    tensors = {"replicated": Tensor((3,)), "split": Tensor((3 * t, 2), split=0), "first": Tensor((3 * t,), split=0)}
    draws = draw(seed, t, 12)
    grads = [{"replicated": x[:3], "split": x[3:9].reshape(3, 2), "first": x[9:]} for x in draws]
    for before, after in zip(grads, region.complete(grads, tensors), strict=True):
        assert all((after[name] == before[name]).all() for name in ("split", "first"))
        expected = before["replicated"] if region is TENSOR_PARALLEL else all_reduce([x[:3] for x in draws])[0]
        assert (after["replicated"] == expected).all()


def alike(xs, ys):
    """Assert that every rank has the same numbers in both lists."""
    assert all(x.shape == y.shape and (x == y).all() for x, y in zip(xs, ys, strict=True))
