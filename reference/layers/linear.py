"""A linear layer Y = X A + b, split over t ranks by the columns of A or by its rows (Shoeybi et al. 2019, section 3).

By columns, every rank computes its own columns of Y from all of X. By rows, every rank takes its own columns of X
and computes a partial sum of all of Y.
"""
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference import ops
from reference.collectives import all_gather, f, f_backward, g, g_backward
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


def sharded_column_parallel_forward(x, shards, gather_output):
    """x [b, s, n], alike on all ranks -> each rank's y [b, s, m/t], or with gather_output all of y."""
    ys = [ops.linear(x_i, p.w, p.b) for x_i, p in zip(f(x, len(shards)), shards)]
    return (all_gather(ys, -1)[0] if gather_output else ys), x


def sharded_column_parallel_backward(dy, shards, x, gather_output):
    """dy, as the forward gave y -> dx [b, s, n], alike on all ranks, and each rank's gradients."""
    t = len(shards)
    # What follows a gathered y is computed alike by all, so each rank's own columns of dy are already complete.
    dys = np.split(dy, t, -1) if gather_output else dy
    partial, grads = [], []
    for dy_i, p in zip(dys, shards):
        dx, grad = linear_backward(dy_i, p, x)
        partial.append(dx)
        grads.append(grad)
    return f_backward(partial), grads


# ---- by rows ------------------------------------------------------------------------------------------------------


def sharded_row_parallel_forward(xs, shards):
    """Each rank's x [b, s, n/t] -> y [b, s, m], alike on all ranks."""
    partial = [ops.linear(x, p.w) for x, p in zip(xs, shards)]   # [b, s, n/t] @ [n/t, m] -> [b, s, m]
    return g(partial) + shards[0].b, xs                                   # the bias once, after the sum


def sharded_row_parallel_backward(dy, shards, xs):
    """dy [b, s, m], alike on all ranks -> each rank's dx [b, s, n/t] and gradients, the bias's alike on all."""
    dxs, grads = [], []
    for dy_i, p, x in zip(g_backward(dy, len(shards)), shards, xs):
        dx, grad = linear_backward(dy_i, p, x)
        dxs.append(dx)
        grads.append(grad)
    return dxs, grads
