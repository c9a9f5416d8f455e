"""Our compiled kernels (fused/) and BLAS's products together, for NumPy arrays of float32 and float64.

Each function has the arguments and results of its namesake in reference/ops.py or plain.py, where its docstring is.
"""
import numpy as np

from mpi_impl.kernels import compiled_halves, cpu, fused, plain
from mpi_impl.kernels.blockwise import BlockwiseAttentionCore, score_scale
from mpi_impl.kernels.fused import core
from mpi_impl.kernels.fused.launcher import NAMES, call
from mpi_impl.kernels.fused.structs import heads_of, site_of, whole_heads
from mpi_impl.runtime.arrays import is_half
from reference import ops
from reference.ops import Mask, rows

FEW = 16            # rows
LARGE = 1 << 17     # elements of a matrix


def linear(x, w, b=None):
    """Multiply a few rows with a large matrix without BLAS, which would first copy the matrix.

    A single row is BLAS's where it adds up rows of the matrix, but not where it adds up columns.
    """
    flat = rows(x)
    whole = w.flags.f_contiguous or w.flags.c_contiguous and len(flat) > 1
    if len(flat) > FEW or w.size < LARGE or not whole or w.dtype != x.dtype:
        return cpu.linear(x, w, b)
    y = fused.few_rows(flat, w).reshape(*x.shape[:-1], w.shape[-1])
    return y if b is None else y + b


def activated_linear(x, w, b, activation):
    if activation == "relu":
        return ops.relu(linear(x, w, b))
    return fused.GELUS[activation](linear(x, w), b)


def accumulate(grad, x, dy):
    """Add up the products of halves in float32, as gradients are, where there are kernels for them."""
    halves = is_half(x) and core.works(NAMES[x.dtype])
    (compiled_halves if halves else plain).accumulate(grad, x, dy)


def adam_update(states, grad, model, runs, factor, step, rate, config):
    """Take the step in one pass over each run, and round the parameters in it where there are kernels for halves."""
    at_once = model is None or core.works(NAMES[model.dtype])
    fused.adam_update(states, grad, model if at_once else None, runs, factor, step, rate, config)
    if not at_once:
        plain.copy_to_model(states[0], model)


def attention_core(q, k, v, causal, site=None, lengths=None):
    q, k, v = map(whole_heads, (q, k, v))
    (b, s, a, _), g = q.shape, k.shape[2]
    context, probs = np.empty(q.shape, q.dtype), np.empty((b, a, s, s), q.dtype)
    mask = None if site is None else Mask(np.zeros(probs.shape, bool), site.scale)
    call("attention.attention", b * g, q, k, v, context, probs, mask and mask.keep, site_of(site, probs.shape), lengths,
         heads_of(q, k, v, context), score_scale(q), causal)
    return context, BlockwiseAttentionCore(q, k, v, probs, causal, mask, lengths)


def attention_core_backward(dcontext, cache):
    (q, k, v, probs, causal, mask, lengths), dcontext = cache, whole_heads(dcontext)
    gradients = dq, dk, dv = np.empty(q.shape, q.dtype), np.zeros(k.shape, q.dtype), np.zeros(v.shape, q.dtype)
    keep, kept_scale = mask or (None, 1.0)
    call("attention.attention_backward", len(q) * k.shape[2], dcontext, q, k, v, probs, keep, kept_scale, lengths,
         *gradients, heads_of(q, k, v, dcontext), heads_of(dq, dk, dv, dcontext), score_scale(q), causal)
    return gradients
