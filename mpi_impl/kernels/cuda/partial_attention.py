"""Partial attention for context parallelism, on a GPU: a few calls of cuBLAS, each for all samples and heads.

Products of halves are on tensor cores, with their factors, probabilities too, in this format; results are float32, as
they are parts of sums. (cuDNN could compute a block, too: its statistics are what `merge` needs.)
"""
from math import sqrt

import numpy as np

from mpi_impl.kernels.cuda.gemm import multiply
from mpi_impl.kernels.fused import dropout, dropout_backward, exp_and_sum, largest, number
from mpi_impl.runtime.arrays import contiguous, narrowed
from reference.layers.online_softmax import Partial, or_zero


def block_attention(q, k, v, diagonal, site=None, real=None):
    q, k, v = map(heads_first, (q, k, v))
    p = block_scores(q, k, diagonal, real)                                # [b, a, n, m]
    highest = largest(p)                                                  # [b, a, n]
    p, total = exp_and_sum(p, or_zero(highest).astype(highest.dtype, copy=False))
    dropped, _ = dropout(p, site)
    return Partial(product(narrowed(dropped, q.dtype), v), highest[..., None], total[..., None])


def block_attention_backward(dcontext, along, highest, total, q, k, v, diagonal, site=None, real=None):
    dcontext, q, k, v = map(heads_first, (dcontext, q, k, v))
    p, _ = exp_and_sum(block_scores(q, k, diagonal, real), highest[..., 0])
    p /= total                                                            # the final probabilities
    dropped, mask = dropout(p, site)
    # forward: context = dropped @ v
    dv = sum_of_groups(narrowed(dropped, q.dtype), dcontext, v)
    dp = dropout_backward(product(dcontext, v.swapaxes(2, 3)), mask)
    # forward: probs = softmax(q k^T / sqrt(d))
    dp -= along
    dp *= p
    dscores, scale = narrowed(dp, q.dtype), 1 / sqrt(q.shape[-1])
    return tuple(x.swapaxes(1, 2) for x in (product(dscores, k, scale), sum_of_groups(dscores, q, k, scale), dv))


def heads_first(x):
    """Copy x [b, n, a, d] to [b, a, n, d]."""
    return contiguous(x.swapaxes(1, 2))


def block_scores(q, k, diagonal, real):
    """Compute q k^T / sqrt(d) [b, a, n, m]; minus infinity where a query does not see a key."""
    scores = product(q, k.swapaxes(2, 3), 1 / sqrt(q.shape[-1]))
    if diagonal:
        past = np.tril(np.ones_like(scores, shape=scores.shape[2:], dtype=bool))
        scores = np.where(past, scores, -np.inf)
    if real is not None:
        seen = np.arange(k.shape[2], like=k) < real[:, None]              # [b, m]
        scores = np.where(seen[:, None, None], scores, -np.inf)
    return scores


def product(x, y, scale=1.0):
    """Compute scale x [b, a, n, k] @ y [b, g, k, m] -> numbers [b, a, n, m]: each y serves a/g neighbouring heads of x.
    """
    out = np.empty_like(x, shape=(*x.shape[:-1], y.shape[-1]), dtype=number(x.dtype), order="C")
    multiply(by_groups(x, y), y.reshape(-1, *y.shape[2:]), by_groups(out, y), scale=scale)
    return out


def sum_of_groups(x, y, like, scale=1.0):
    """Compute scale x^T @ y -> numbers [b, g, k, m] for x [b, a, n, k], y [b, a, n, m], summed over the a/g heads of
    each group of `like` [b, g, ...].
    """
    out = np.empty_like(x, shape=(*like.shape[:2], x.shape[-1], y.shape[-1]), dtype=number(x.dtype), order="C")
    multiply(by_groups(x, like).swapaxes(1, 2), by_groups(y, like), out.reshape(-1, *out.shape[2:]),
             scale=scale)
    return out


def by_groups(x, y):
    """View the heads of a group as one: x [b, a, n, k] -> [b g, a/g n, k], for y [b, g, ...]."""
    return x.reshape(y.shape[0] * y.shape[1], -1, x.shape[-1])
