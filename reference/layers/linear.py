"""A linear layer Y = X A + b, split over t ranks by the columns of A or by its rows (Shoeybi et al. 2019, section 3).

By columns, every rank computes its own columns of Y from all of X. By rows, every rank takes its own columns of X
and computes a partial sum of all of Y.
"""
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference import ops
from reference.comm.collectives import all_gather
from reference.params import bias, weight


@dataclass(frozen=True)
class Linear:
    """Tensors of a linear layer, or their gradients."""

    w: Any   # A [n, m], split along axis 1 by columns, along axis 0 by rows
    b: Any   #   [m], split by columns, replicated by rows


def column_parallel_tensors(n, m, std):
    """On each of t ranks: m/t columns of A, m/t elements of the bias."""
    return Linear(weight((n, m), std, split=1), bias((m,), split=0))


def row_parallel_tensors(n, m, std):
    """On each of t ranks: n/t rows of A, and the whole bias."""
    return Linear(weight((n, m), std, split=0), bias((m,)))


def linear_forward(x, p):
    """x [b, s, n] -> y [b, s, m]."""
    return ops.linear(x, p.w, p.b), x


def linear_backward(dy, p, x):
    """dy [b, s, m] -> dx [b, s, n] and the gradients, as a Linear."""
    dx, dw, db = ops.linear_backward(dy, x, p.w)
    return dx, Linear(dw, db)


# ---- by columns ---------------------------------------------------------------------------------------------------


def sharded_column_parallel_forward(xs, shards, gather_output, region):
    """Each rank's x [b, s, n], as it is outside the region -> its y [b, s, m/t], or with gather_output all of y."""
    entered = region.enter(xs)
    ys = [ops.linear(x, p.w, p.b) for x, p in zip(entered, shards)]           # [b, s, n] @ [n, m/t] -> [b, s, m/t]
    return (all_gather(ys, -1) if gather_output else ys), region.keep(xs, entered)


def sharded_column_parallel_backward(dys, shards, kept, gather_output, region):
    """Each rank's dy, as the forward gave y -> its dx, as it is outside the region, and its gradients."""
    if gather_output:
        # What follows a gathered y is computed alike by all, so each rank's own columns of dy are already complete.
        dys = [np.split(dy, len(dys), -1)[rank] for rank, dy in enumerate(dys)]
    pairs = [linear_backward(dy, p, x) for dy, p, x in zip(dys, shards, region.enter_again(kept))]
    partial, grads = zip(*pairs)
    return region.enter_backward(partial), list(grads)


# ---- by rows ------------------------------------------------------------------------------------------------------


def sharded_row_parallel_forward(xs, shards, region):
    """Each rank's x [b, s, n/t] -> its y [b, s, m], as it is outside the region."""
    partial = [ops.linear(x, p.w) for x, p in zip(xs, shards)]   # [b, s, n/t] @ [n/t, m] -> [b, s, m]
    return [y + p.b for y, p in zip(region.leave(partial), shards)], xs       # the bias once, after the sum


def sharded_row_parallel_backward(dys, shards, xs, region):
    """Each rank's dy [b, s, m], as it is outside the region -> its dx [b, s, n/t] and its gradients."""
    dbs = [ops.rows(dy).sum(0) for dy in dys]                    # forward: y = g(x @ w) + b, outside the region
    dxs, grads = [], []
    for dy, p, x, db in zip(region.leave_backward(dys), shards, xs, dbs):
        dx, grad = linear_backward(dy, p, x)
        dxs.append(dx)
        grads.append(replace(grad, b=db))
    return dxs, grads
