"""Attention's core on a GPU: by cuDNN where possible (flash.py), else by products and softmax, a sample at a time.

For halves the cache has q, k and v, and no probabilities, as in FlashAttention (Dao et al. 2022); otherwise it has
probabilities and mask, as the textbook's has.
"""
from math import sqrt

import numpy as np

from mpi_impl.kernels.cuda import flash
from mpi_impl.kernels.cuda.gemm import multiply
from mpi_impl.kernels.fused import attention_probs, attention_probs_backward, number
from mpi_impl.kernels.fused.structs import rows_of
from mpi_impl.runtime.arrays import is_half
from reference.ops import AttentionCore, CoreInputs, Mask, masked


def attention_core(q, k, v, causal, site=None, lengths=None):
    inputs = CoreInputs(q, k, v, causal, site, lengths)
    if flash.supports(inputs):
        return flash.attention_core(inputs)
    context, core = np.empty_like(q, order="C"), None if is_half(q) else empty_core(inputs, len(q))
    for i in range(len(q)):
        dropped = fill_probs(sample(core, i) if core else empty_core(inputs, 1), inputs, i)
        multiply_by_groups(dropped, heads(v, i), heads(context, i))   # [a, s, s] @ [g, s, d]
    return context, core or inputs


def attention_core_again(inputs):
    """Make the cache of attention_core again. For halves it is the inputs, unless cuDNN keeps more."""
    return inputs if is_half(inputs.q) and not flash.supports(inputs) else attention_core(*inputs)[1]


def attention_core_backward(dcontext, cache):
    if isinstance(cache, flash.FlashCache):
        if (gradients := flash.attention_core_backward(dcontext, cache)) is not None:
            return gradients
        cache = CoreInputs(*cache[:4], None, cache.lengths)
    q, k, v = cache[:3]
    gradients = dq, dk, dv = tuple(np.empty_like(x, order="C") for x in (q, k, v))
    for i in range(len(q)):
        if isinstance(cache, CoreInputs):
            core = empty_core(cache, 1)
            dropped = fill_probs(core, cache, i)
        else:
            core = sample(cache, i)
            dropped = masked(core.probs[0], core.mask and Mask(core.mask.keep[0], core.mask.scale))
        # forward: context = dropped @ v
        dy, ddropped, dscores = heads(dcontext, i), np.empty_like(core.probs[0]), np.empty_like(dropped)
        multiply_by_groups(dy, heads(v, i).swapaxes(1, 2), ddropped)
        sum_of_groups(dropped, dy, heads(dv, i))
        # forward: scores = q @ k^T / sqrt(d); probs = softmax(scores); dropped = dropout(probs)
        s = core.probs.shape[-1]
        attention_probs_backward(ddropped, core.probs, core.mask, core.probs.shape, rows_of(0, (s, s), 0, s, s),
                                 1 / sqrt(q.shape[-1]), dscores)
        multiply_by_groups(dscores, heads(k, i), heads(dq, i))
        sum_of_groups(dscores, heads(q, i), heads(dk, i))
    return gradients


def cached_attention(q, k, v):
    (b, n, a, d), m = q.shape, k.shape[1]
    context = np.empty_like(q, order="C")
    for i in range(b):
        scores = np.empty_like(q, shape=(a, n, m), dtype=number(q.dtype), order="C")
        probs = np.empty_like(scores, dtype=q.dtype) if is_half(q) else None
        multiply_by_groups(heads(q, i), heads(k, i).swapaxes(1, 2), scores)      # [a, n, d] @ [g, d, m]
        attention_probs(scores, probs, None, None, None, (1, a, n, m), rows_of(0, (n, m), m - n, n, m), 1 / sqrt(d),
                        True)
        multiply_by_groups(scores if probs is None else probs, heads(v, i), heads(context, i))   # [a, n, m] @ [g, m, d]
    return context


def multiply_by_groups(x, y, out) -> None:
    """Set out [a, n, m] to x @ y, for heads x [a, n, k], a/g of which share each y [g, k, m].

    The first head of every group is one call, the second is another.
    """
    each = len(x) // len(y)
    for head in range(each):
        multiply(x[head::each], y, out[head::each])


def sum_of_groups(x, y, out) -> None:
    """Set out [g, k, m] to the sum of x^T @ y over the heads x [a, n, k], y [a, n, m] of each group."""
    each = len(x) // len(out)
    for head in range(each):
        multiply(x[head::each].swapaxes(1, 2), y[head::each], out, add=head > 0)


def fill_probs(core: AttentionCore, inputs: CoreInputs, i: int):
    """Fill the probabilities, as `number`s, and the mask [1, a, s, s] of sample i.

    -> what dropout lets through of the probabilities [a, s, s], in the format of q
    """
    (q, k, _, causal, site, lengths), probs = inputs, core.probs[0]
    multiply_by_groups(heads(q, i), heads(k, i).swapaxes(1, 2), probs)           # [a, s, d] @ [g, d, s]
    s, real = probs.shape[-1], None if lengths is None else lengths[i:i + 1]
    dropped = None if site is None and probs.dtype == q.dtype else np.empty_like(probs, dtype=q.dtype)
    here = site and site.moved(i)
    attention_probs(probs, dropped, core.mask and core.mask.keep, here, real, core.probs.shape,
                    rows_of(0, (s, s), 0, s, s), 1 / sqrt(q.shape[-1]), causal)
    return probs if dropped is None else dropped


def empty_core(inputs: CoreInputs, samples: int) -> AttentionCore:
    """Allocate the probabilities and the mask of this number of samples."""
    q, k, v, _, site, _ = inputs
    _, s, a, _ = q.shape
    probs = np.empty_like(q, shape=(samples, a, s, s), dtype=number(q.dtype), order="C")
    return AttentionCore(q, k, v, probs, site and Mask(np.empty_like(probs, dtype=bool), site.scale))


def sample(core: AttentionCore, i: int) -> AttentionCore:
    """Select the probabilities and the mask of sample i alone, as views."""
    return core._replace(probs=core.probs[i:i + 1], mask=core.mask and Mask(core.mask.keep[i:i + 1], core.mask.scale))


def heads(x, i: int):
    """View sample i of x [b, s, a, d] as [a, s, d], or of [b, s, g, d] as [g, s, d]."""
    return x[i].swapaxes(0, 1)
