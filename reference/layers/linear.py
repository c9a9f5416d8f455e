"""A linear layer Y = X A + b, sharded over t ranks by the columns of A or by its rows (Shoeybi et al. 2019, section 3).

By columns, every rank computes its own columns of Y from all of X. By rows, every rank takes its own columns of X and
computes a partial sum of all of Y.
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
    """Declare A and its bias sharded by columns: m/t columns of A and m/t elements of the bias on each of t ranks."""
    return Linear(weight((n, m), std, split=1), bias((m,), split=0))


def row_parallel_tensors(n, m, std):
    """Declare A sharded by rows, n/t on each of t ranks, with the bias replicated."""
    return Linear(weight((n, m), std, split=0), bias((m,)))


def linear_forward(x, p):
    """Map x [b, s, n] -> y [b, s, m]."""
    return ops.linear(x, p.w, p.b), x


def linear_backward(dy, p, x):
    """Return dx [b, s, n] and the gradients, as a Linear, for dy [b, s, m]."""
    dx, dw, db = ops.linear_backward(dy, x, p.w)
    return dx, Linear(dw, db)


# ---- by columns ---------------------------------------------------------------------------------------------------


def sharded_column_parallel_forward(xs, shards, gather_output, region):
    """Map each rank's x [b, s, n], outside the region -> its y [b, s, m/t], or all of y with gather_output."""
    entered = region.enter(xs)
    ys = [ops.linear(x, p.w, p.b) for x, p in zip(entered, shards)]           # [b, s, n] @ [n, m/t] -> [b, s, m/t]
    return (all_gather(ys, -1) if gather_output else ys), region.keep(xs, entered)


def sharded_column_parallel_backward(dys, shards, kept, gather_output, region):
    """Return each rank's dx, outside the region, and gradients for its dy, in the layout of the forward's y."""
    if gather_output:
        # All ranks compute the same from a gathered y, so each rank's own columns of dy are already complete.
        dys = [np.split(dy, len(dys), -1)[rank] for rank, dy in enumerate(dys)]
    pairs = [linear_backward(dy, p, x) for dy, p, x in zip(dys, shards, region.enter_again(kept))]
    partial, grads = zip(*pairs)
    return region.enter_backward(partial), list(grads)


# ---- by rows ------------------------------------------------------------------------------------------------------


def sharded_row_parallel_forward(xs, shards, region):
    """Map each rank's x [b, s, n/t] -> its y [b, s, m], in the layout outside the region."""
    partial = [ops.linear(x, p.w) for x, p in zip(xs, shards)]   # [b, s, n/t] @ [n/t, m] -> [b, s, m]
    return [y + p.b for y, p in zip(region.leave(partial), shards)], xs       # the bias once, after the sum


def sharded_row_parallel_backward(dys, shards, xs, region):
    """Return each rank's dx [b, s, n/t] and gradients for its dy [b, s, m], in the layout outside the region."""
    dbs = [ops.rows(dy).sum(0) for dy in dys]                    # forward: y = g(x @ w) + b, outside the region
    dxs, grads = [], []
    for dy, p, x, db in zip(region.leave_backward(dys), shards, xs, dbs):
        dx, grad = linear_backward(dy, p, x)
        dxs.append(dx)
        grads.append(replace(grad, b=db))
    return dxs, grads
