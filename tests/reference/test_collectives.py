"""Collectives over lists, and the theorem that f and g are adjoint."""
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reference.collectives import all_gather, all_reduce, broadcast, f, f_backward, g, g_backward, reduce_scatter
from tests.strategies import close

RANKS, SEEDS = st.integers(1, 9), st.integers(0, 2**32 - 1)


def per_rank(t, seed, *shape):
    return list(np.random.default_rng(seed).normal(size=(t, *shape)))


def inner(xs, ys):
    """The inner product of what all ranks hold together."""
    return sum(float((x * y).sum()) for x, y in zip(xs, ys, strict=True))


@given(RANKS, st.integers(1, 4), SEEDS)
def test_f_and_its_backward_are_adjoint(t, n, seed):
    """<f(x), y> = <x, f_backward(y)> for all x and y."""
    x, ys = per_rank(1, seed, n, 2)[0], per_rank(t, seed + 1, n, 2)
    close(np.array(inner(f(x, t), ys)), np.array(inner([x], [f_backward(ys)])))


@given(RANKS, st.integers(1, 4), SEEDS)
def test_g_and_its_backward_are_adjoint(t, n, seed):
    """<g(x), y> = <x, g_backward(y)> for all x and y."""
    xs, y = per_rank(t, seed, n, 2), per_rank(1, seed + 1, n, 2)[0]
    close(np.array(inner([g(xs)], [y])), np.array(inner(xs, g_backward(y, t))))


@given(RANKS, SEEDS)
def test_f_and_g_are_conjugate(t, seed):
    """The backward of one is the forward of the other."""
    x, xs = per_rank(1, seed, 3)[0], per_rank(t, seed, 3)
    assert all((a == b).all() for a, b in zip(f(x, t), g_backward(x, t), strict=True))
    assert (f_backward(xs) == g(xs)).all()


@given(RANKS, st.integers(0, 1), SEEDS)
def test_an_all_reduce_is_a_reduce_scatter_then_an_all_gather(t, axis, seed):
    xs = per_rank(t, seed, 2 * t, 3 * t)
    for total, again in zip(all_reduce(xs), all_gather(reduce_scatter(xs, axis), axis), strict=True):
        close(total, np.sum(xs, 0))
        assert (total == again).all()


@given(RANKS, SEEDS)
def test_maximum_and_broadcast(t, seed):
    xs = per_rank(t, seed, 3)
    assert all((x == np.max(xs, 0)).all() for x in all_reduce(xs, np.maximum))
    assert all((x == xs[t - 1]).all() for x in broadcast(xs, t - 1))
