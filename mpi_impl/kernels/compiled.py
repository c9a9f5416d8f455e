"""Our compiled kernels (fused/) and BLAS's products together, for NumPy arrays of float32 and float64.

Each function has the arguments and results of its namesake in reference/ops.py or plain.py, where its docstring is.
"""
import numpy as np

from mpi_impl.kernels import fused, plain
from mpi_impl.kernels.blockwise import (BlockwiseAttentionCore, attention_blocks, by_groups, heads_first, score_scale,
                                        sum_of_group, within_groups)
from mpi_impl.kernels.fused import attention_probs, attention_probs_backward
from mpi_impl.kernels.fused.structs import rows_of
from reference import ops
from reference.ops import Mask, rows

FEW = 16            # rows
LARGE = 1 << 17     # elements of a matrix
ROOM = 1 << 18      # probabilities at a time: fewer calls count for more than the cache, where a row is done in one go


def linear(x, w, b=None):
    """Multiply a few rows with a large matrix without BLAS, which would first copy the matrix.

    A single row is BLAS's where it adds up rows of the matrix, but not where it adds up columns.
    """
    flat = rows(x)
    whole = w.flags.f_contiguous or w.flags.c_contiguous and len(flat) > 1
    if len(flat) <= FEW and w.size >= LARGE and whole and w.dtype == x.dtype:
        y = fused.few_rows(flat, w).reshape(*x.shape[:-1], w.shape[-1])
    else:
        y = ops.linear(x, w)
    if b is not None:
        y += b
    return y


def activated_linear(x, w, b, activation):
    if activation == "relu":
        return ops.relu(linear(x, w, b))
    return fused.GELUS[activation](linear(x, w), b)


def adam_update(states, grad, model, runs, factor, step, rate, config):
    """Take the step in one pass over each run; the kernels of a core have no formats of two bytes."""
    fused.adam_update(states, grad, None, runs, factor, step, rate, config)
    plain.copy_to_model(states[0], model)


def attention_core(q, k, v, causal, site=None, lengths=None):
    """Go block by block as blockwise.py does; all that happens to scores between two products is one kernel."""
    (b, s, a, _), g = q.shape, k.shape[2]
    context, probs = np.empty(q.shape, q.dtype), np.empty((b, a, s, s), q.dtype)
    mask = None if site is None else Mask(np.zeros(probs.shape, bool), site.scale)
    core = BlockwiseAttentionCore(q, k, v, probs, causal, mask, lengths)
    scale = score_scale(q)
    q, k, v, y = heads_first(g, q, k, v, context)
    for samples, heads, block, keys in attention_blocks(b, s, a, causal, lengths, ROOM, a // g):
        p, where = probs[samples, heads, block, :keys], rows_at(samples, heads, block, keys, a, s)
        groups, mine = within_groups(heads, a // g)
        at, seen = (samples, groups, mine, block), (samples, groups, slice(None), slice(keys))
        real = None if lengths is None else lengths[samples]
        np.matmul(q[at], k[seen].swapaxes(3, 4), out=by_groups(p, groups))                     # [rows, d] @ [d, keys]
        dropped, here = None, None
        if site is not None:
            dropped = np.empty(p.shape, p.dtype)
            here = site.moved(samples.start, heads.start, block.start)
        attention_probs(probs, dropped, mask and mask.keep, here, real, p.shape, where, scale, causal)
        np.matmul(by_groups(p if dropped is None else dropped, groups), v[seen], out=y[at])
    return context, core


def attention_core_backward(dcontext, cache):
    q, k, v, probs, causal, mask, lengths = cache
    (b, s, a, _), g = q.shape, k.shape[2]
    gradients = dq, dk, dv = np.empty(q.shape, q.dtype), np.zeros(k.shape, q.dtype), np.zeros(v.shape, q.dtype)
    scale = score_scale(q)
    q, k, v, dcontext, dq, dk, dv = heads_first(g, q, k, v, dcontext, dq, dk, dv)
    for samples, heads, block, keys in attention_blocks(b, s, a, causal, lengths, ROOM, a // g):
        p, where = probs[samples, heads, block, :keys], rows_at(samples, heads, block, keys, a, s)
        groups, mine = within_groups(heads, a // g)
        at, seen = (samples, groups, mine, block), (samples, groups, slice(None), slice(keys))
        dy, dropped = dcontext[at], p
        if mask is not None:
            dropped = p * mask.keep[samples, heads, block, :keys]
            dropped *= p.dtype.type(mask.scale)
        dv[seen] += sum_of_group(by_groups(dropped, groups).swapaxes(3, 4) @ dy)
        dp = dy @ v[seen].swapaxes(3, 4)                                 # forward: context = dropped @ v
        # forward: dropped = dropout(softmax(q k^T / sqrt(d)))
        attention_probs_backward(dp, probs, mask, p.shape, where, scale, dp)
        np.matmul(dp, k[seen], out=dq[at])
        dk[seen] += sum_of_group(dp.swapaxes(3, 4) @ q[at])
    return gradients


def rows_at(samples: slice, heads: slice, block: slice, keys: int, a: int, s: int):
    """Locate a block of attention_blocks in the probabilities.

    It is some samples with all heads of each, or some heads of one sample: heads follow one another.
    """
    return rows_of((samples.start * a + heads.start) * s * s + block.start * s, (s, s), block.start,
                   block.stop - block.start, keys)
