"""Collectives as functions of a list with one array per rank, and the conjugate operators f and g.

In the textbook a list holds what differs from rank to rank; a bare array is what all ranks hold alike.
"""
import numpy as np


def all_reduce(xs, op=np.add):
    """Every rank gets the elementwise sum (or np.maximum) over all ranks: one array per rank, all alike."""
    total = xs[0]
    for x in xs[1:]:
        total = op(total, x)
    return [total for _ in xs]


def all_gather(xs, axis):
    """Every rank gets all the pieces, joined along `axis` in rank order."""
    joined = np.concatenate(xs, axis)
    return [joined for _ in xs]


def reduce_scatter(xs, axis):
    """Rank i gets the i-th piece, along `axis`, of the sum. An all-reduce is this, then an all-gather."""
    return np.split(all_reduce(xs)[0], len(xs), axis)


def broadcast(xs, root=0):
    """Every rank gets what rank `root` holds."""
    return [xs[root] for _ in xs]


# ---- f and g: at the edges of a tensor-parallel region (Shoeybi et al. 2019, section 3, figure 3) ---------------
#
# As linear maps they are adjoint: f copies and its backward sums, g sums and its backward copies. Backpropagation
# through any linear map is its adjoint, so f's backward *is* g, and g's backward *is* f.


def f(x, t):
    """Into the region: x, alike on all ranks, becomes one x per rank. Costs nothing."""
    return [x] * t


def f_backward(dxs):
    """Every rank used x, so its gradient is the sum of what they all say: an all-reduce."""
    return all_reduce(dxs)[0]


def g(partial):
    """Out of the region: the ranks' partial sums become one sum, alike on all ranks: an all-reduce."""
    return all_reduce(partial)[0]


def g_backward(dy, t):
    """Each partial sum entered the sum once, so each gets dy as it is. Costs nothing."""
    return [dy] * t
