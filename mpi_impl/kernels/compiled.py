"""Fast spellings for NumPy arrays of float32 and float64 where there is a C++ compiler: our kernels (fused/) for the
element-wise work, BLAS for the products between.

Each function takes, gives and means what its namesake in reference/ops.py does, where its docstring stands. What has no
spelling of its own here is that of cpu.py.
"""
import numpy as np

from mpi_impl.kernels import cpu, fused
from mpi_impl.kernels.cpu import AttentionCore, attention_blocks, heads_first, score_scale
from mpi_impl.kernels.fused import (add_branch, add_branch_and_norm, attention_probs, attention_probs_backward,
                                    cross_entropy_backward, dropout, dropout_backward, exp_and_sum, gelu, gelu_backward,
                                    gelu_exact, gelu_exact_backward, layer_norm, layer_norm_backward, rows_of)
from reference import ops
from reference.ops import Mask

__all__ = ["add_branch", "add_branch_and_norm", "attention_core", "attention_core_backward",
           "cross_entropy_backward", "dropout", "dropout_backward", "exp_and_sum", "gelu", "gelu_backward",
           "gelu_exact", "gelu_exact_backward", "layer_norm", "layer_norm_backward", "linear_gelu", "linear_gelu_exact",
           "update_states"]

ROOM = 1 << 18      # probabilities at a time: fewer calls count for more than the cache, where a row is done in one go


def __getattr__(name):
    return getattr(cpu, name)


def linear_gelu(x, w, b):
    """gelu(linear(x, w, b)), and gelu's cache."""
    return gelu(ops.linear(x, w), b)


def linear_gelu_exact(x, w, b):
    """Likewise of gelu_exact."""
    return gelu_exact(ops.linear(x, w), b)


def update_states(states, grad, runs, factor, step, rate, config):
    """kernels.update_states, in one pass over each run."""
    fused.adam_update(states, grad, None, runs, factor, step, rate, config)


def attention_core(q, k, v, causal, site=None, lengths=None):
    """As cpu.py's, block by block; what it does to scores between two products is one kernel."""
    b, s, a, _ = q.shape
    context, probs = np.empty(q.shape, q.dtype), np.empty((b, a, s, s), q.dtype)
    mask = None if site is None else Mask(np.zeros(probs.shape, bool), site.scale)
    core = AttentionCore(q, k, v, context, probs, causal, mask, lengths)
    scale = score_scale(q)
    q, k, v, y = heads_first(q, k, v, context)
    for some, heads, block, keys in attention_blocks(b, s, a, causal, lengths, ROOM):
        p, where = probs[some, heads, block, :keys], rows_at(some, heads, block, keys, a, s)
        real = None if lengths is None else lengths[some]
        np.matmul(q[some, heads, block], k[some, heads, :keys].swapaxes(2, 3), out=p)    # [rows, d] @ [d, keys]
        dropped, here = None, None
        if site is not None:
            dropped = np.empty(p.shape, p.dtype)
            here = site._replace(first=tuple(map(sum, zip(site.first, (some.start, heads.start, block.start, 0)))))
        attention_probs(probs, dropped, mask and mask.keep, here, real, p.shape, where, scale, causal)
        np.matmul(p if dropped is None else dropped, v[some, heads, :keys], out=y[some, heads, block])
    return context, core


def attention_core_backward(dcontext, cache):
    q, k, v, _, probs, causal, mask, lengths = cache
    b, s, a, _ = q.shape
    gradients = dq, dk, dv = np.empty(q.shape, q.dtype), np.zeros(q.shape, q.dtype), np.zeros(q.shape, q.dtype)
    scale = score_scale(q)
    q, k, v, dcontext, dq, dk, dv = heads_first(q, k, v, dcontext, dq, dk, dv)
    for some, heads, block, keys in attention_blocks(b, s, a, causal, lengths, ROOM):
        p, where = probs[some, heads, block, :keys], rows_at(some, heads, block, keys, a, s)
        dy, dropped = dcontext[some, heads, block], p
        if mask is not None:
            dropped = p * mask.keep[some, heads, block, :keys]
            dropped *= p.dtype.type(mask.scale)
        dv[some, heads, :keys] += dropped.swapaxes(2, 3) @ dy
        dp = dy @ v[some, heads, :keys].swapaxes(2, 3)                # forward: context = dropped @ v
        # forward: dropped = dropout(softmax(q k^T / sqrt(d)))
        attention_probs_backward(dp, probs, mask, p.shape, where, scale, dp)
        np.matmul(dp, k[some, heads, :keys], out=dq[some, heads, block])
        dk[some, heads, :keys] += dp.swapaxes(2, 3) @ q[some, heads, block]
    return gradients


def rows_at(some: slice, heads: slice, block: slice, keys: int, a: int, s: int):
    """Where a block of attention_blocks lies in the probabilities: some samples and all heads of each, or some heads of
    one sample, so that heads follow one another.
    """
    return rows_of((some.start * a + heads.start) * s * s + block.start * s, (s, s), block.start,
                   block.stop - block.start, keys)
