"""Attention in NumPy on one core, block by block of queries: later keys are skipped, and a block stays in the cache.
With a C++ compiler compiled.py takes its place, whose softmax is that of fused/softmax.cu.

Each function has the arguments and results of its namesake in reference/ops.py, where its docstring is. The a/g heads
of queries that share a head of keys and values have an axis of their own: a view [b, g, a/g, s, d] of queries, and
[b, g, 1, s, d] of keys and values.
"""
from itertools import product
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.kernels.cpu import draw_rows, empty, row_starts
from mpi_impl.runtime.arrays import TILE
from reference.ops import Keys, Mask, Probs, ProbsMask, Queries

ROWS = 64       # queries at a time; keys after the last of them are skipped


class BlockwiseAttentionCore(NamedTuple):
    """The cache of attention, with what the backward needs to skip keys whose probabilities are 0."""

    q: Queries        # [b, s, a, d]
    k: Keys           # [b, s, g, d]
    v: Keys
    probs: Probs      # [b, a, s, s]
    causal: bool      # probs above the diagonal are 0
    mask: ProbsMask   # a Mask of probs, not drawn wherever they are 0; or None
    lengths: Any      # [b]: probs of later keys are 0; or None


def attention_core(q, k, v, causal, site=None, lengths=None):
    (b, s, a, _), g = q.shape, k.shape[2]
    context, probs, mask = empty(q), empty(q, (b, a, s, s)), None
    if site is not None:
        mask, starts = Mask(np.zeros(probs.shape, bool), site.scale), row_starts(site, probs.shape, q)
    core = BlockwiseAttentionCore(q, k, v, probs, causal, mask, lengths)
    scale, ones = q.dtype.type(score_scale(q)), np.ones_like(q, shape=(s, 1))
    q, k, v, y = heads_first(g, q, k, v, context)
    for samples, heads, block, keys in attention_blocks(b, s, a, causal, lengths, each=a // g):
        p, (groups, mine) = probs[samples, heads, block, :keys], within_groups(heads, a // g)
        at, seen = (samples, groups, mine, block), (samples, groups, slice(None), slice(keys))
        np.matmul(q[at] * scale, k[seen].swapaxes(3, 4), out=by_groups(p, groups))             # [rows, d] @ [d, keys]
        if causal and keys > block.start:                             # the last columns are the rows' own positions
            p[..., block.start:] += FUTURE[:block.stop - block.start, :keys - block.start]
        if lengths is not None:
            p += np.where(np.arange(keys) < lengths[samples, None, None, None], 0, -np.inf).astype(p.dtype)
        p -= np.maximum.reduce(p, axis=-1, keepdims=True)
        np.exp(p, out=p)
        p *= 1 / (p @ ones[:keys])                                    # BLAS adds a row up faster than NumPy
        if mask is not None:
            for i, j in product(range(b)[samples], range(a)[heads]):
                draw_rows(site, starts[i, j, block], mask.keep[i, j, block, :keys])
            p = p * mask.keep[samples, heads, block, :keys]           # the scale comes last, where there is less to do
        probs[samples, heads, block, keys:] = 0
        np.matmul(by_groups(p, groups), v[seen], out=y[at])           # [rows, keys] @ [keys, d] -> [rows, d]
    if mask is not None:
        context *= mask.scale
    return context, core


def attention_core_backward(dcontext, cache):
    q, k, v, probs, causal, mask, lengths = cache
    (b, s, a, _), g = q.shape, k.shape[2]
    gradients = dq, dk, dv = empty(q), np.zeros_like(k, order="C"), np.zeros_like(v, order="C")
    scale = q.dtype.type(score_scale(q))
    q, k, v, dcontext, dq, dk, dv = heads_first(g, q, k, v, dcontext, dq, dk, dv)
    for samples, heads, block, keys in attention_blocks(b, s, a, causal, lengths, each=a // g):
        groups, mine = within_groups(heads, a // g)
        at, seen = (samples, groups, mine, block), (samples, groups, slice(None), slice(keys))
        p, dy = by_groups(probs[samples, heads, block, :keys], groups), dcontext[at]
        dropped = p
        if mask is not None:
            keep = by_groups(mask.keep[samples, heads, block, :keys], groups)
            dropped, dy = p * keep, dy * dy.dtype.type(mask.scale)
        dv[seen] += sum_of_group(dropped.swapaxes(3, 4) @ dy)
        dp = dy @ v[seen].swapaxes(3, 4)                              # forward: context = dropped @ v * scale
        if mask is not None:
            dp *= keep                                                # forward: dropped = p * keep
        dp *= p                                                       # forward: p = softmax(scores)
        dp -= dp.sum(-1, keepdims=True) * p
        np.multiply(dp @ k[seen], scale, out=dq[at])                  # forward: q k^T / sqrt(d)
        dk[seen] += sum_of_group(dp.swapaxes(3, 4) @ (q[at] * scale))
    return gradients


def cached_attention(q, k, v):
    """Go block by block of queries, all samples and heads at a time: a new token has only one row in each."""
    n, m, context = q.shape[1], k.shape[1], empty(q)
    scale = q.dtype.type(score_scale(q))
    q, k, v, y = heads_first(k.shape[2], q, k, v, context)
    for start in range(0, n, ROWS):
        block = slice(start, min(start + ROWS, n))
        keys, own = m - n + block.stop, block.stop - start            # how many are seen, the last of them in part
        p = (q[:, :, :, block] * scale) @ k[:, :, :, :keys].swapaxes(3, 4)    # [rows, d] @ [d, keys]
        p[..., keys - own:] += FUTURE[:own, :own]
        p -= np.maximum.reduce(p, axis=-1, keepdims=True)
        np.exp(p, out=p)
        p /= p.sum(-1, keepdims=True)
        np.matmul(p, v[:, :, :, :keys], out=y[:, :, :, block])        # [rows, keys] @ [keys, d]
    return context


def score_scale(q) -> float:
    """Return the factor of q k^T, for q [b, s, a, d]."""
    return 1 / sqrt(q.shape[-1])


def heads_first(g, *arrays):
    """View arrays [b, s, a, d] as [b, g, a/g, s, d], and those [b, s, g, d] as [b, g, 1, s, d]."""
    return [by_groups(x.swapaxes(1, 2), slice(0, g)) for x in arrays]


def by_groups(x, groups: slice):
    """View the heads of these groups, [b, heads, ...], as [b, groups, heads of each, ...]."""
    return x.reshape(len(x), groups.stop - groups.start, -1, *x.shape[2:])


def within_groups(heads: slice, each: int) -> tuple[slice, slice]:
    """Return the groups of these heads, of which each has this many, and the place of the heads within each group."""
    first, last = heads.start // each, (heads.stop - 1) // each
    return slice(first, last + 1), slice(heads.start - first * each, heads.stop - last * each)


def sum_of_group(x):
    """Sum gradients [b, g, a/g, keys, d] over the heads of each group -> [b, g, 1, keys, d]."""
    return x if x.shape[2] == 1 else x.sum(2, keepdims=True)


def attention_blocks(b, s, a, causal, lengths, each):
    """Yield blocks of queries: slices of samples, heads and queries, and how many of the first keys they may see.

    A block has as many probabilities as fit the cache, or those of one head. It has whole groups of `each` heads, or
    heads of one group.
    """
    for start in range(0, s, ROWS):
        end = min(start + ROWS, s)
        keys = end if causal else s
        fit = whole_groups(max(1, 2 * TILE // ((end - start) * keys)), each)
        for i, j in product(range(0, b, max(1, fit // a)), range(0, a, fit)):
            samples = slice(i, i + max(1, fit // a))
            real = keys if lengths is None else min(keys, int(lengths[samples].max()))
            yield samples, slice(j, min(j + fit, a)), slice(start, end), real


def whole_groups(heads: int, each: int) -> int:
    """Return the largest number of heads, at most this one, that is whole groups or divides a group."""
    return heads // each * each if heads >= each else max(n for n in range(1, heads + 1) if each % n == 0)


FUTURE = np.triu(np.full((ROWS, ROWS), -np.inf, np.float32), 1)   # added to scores: hides them
