"""Partial attention for context parallelism, on a core: some queries, some keys, and no probability kept.

Each function has the arguments and results of its namesake in reference/layers/online_softmax.py, where its docstring
is. Of two-byte formats the arrays are read, and results are float32: they are parts of sums.
"""
from itertools import product

import numpy as np

from mpi_impl.kernels import blockwise
from mpi_impl.kernels.blockwise import score_scale
from mpi_impl.kernels.cpu import draw_mask, empty
from mpi_impl.runtime.arrays import widened
from reference.layers.online_softmax import Partial, or_zero

ROOM = 1 << 18      # scores at a time


def block_attention(q, k, v, diagonal, site=None, real=None):
    q, k, v = (by_groups(widened(x), k) for x in (q, k, v))
    (b, g, each, n, d), scale = q.shape, q.dtype.type(score_scale(q))
    found = Partial(empty(q), *(empty(q, (b, g, each, n, 1)) for _ in range(2)))
    for at, keys in tiles(q, k, diagonal):
        samples, groups, _, rows = at
        p = scores_of(q[at] * scale, k[samples, groups, 0, :keys], rows, diagonal, real, samples)
        highest = p.max(-1, keepdims=True)
        p -= or_zero(highest)
        np.exp(p, out=p)
        found.highest[at], found.total[at] = highest, p.sum(-1, keepdims=True)
        mask = mask_of(site, at, p)
        if mask is not None:
            p *= mask.keep
        context = together(p) @ v[samples, groups, 0, :keys]           # [each x rows, keys] @ [keys, d]
        found.context[at] = context.reshape(*p.shape[:-1], d) if mask is None else (
            context.reshape(*p.shape[:-1], d) * mask.scale)
    return Partial(*(x.reshape(b, g * each, n, -1) for x in found))


def block_attention_backward(dcontext, along, highest, total, q, k, v, diagonal, site=None, real=None):
    dcontext, q, k, v = (by_groups(widened(x), k) for x in (dcontext, q, k, v))
    (b, g, each, n, d), scale = q.shape, q.dtype.type(score_scale(q))
    along, highest, inverse = (x.reshape(b, g, each, n, 1) for x in (along, highest, 1 / total))
    gradients = dq, dk, dv = empty(q), np.zeros_like(k, order="C"), np.zeros_like(v, order="C")
    for at, keys in tiles(q, k, diagonal):
        samples, groups, _, rows = at
        seen = samples, groups, 0, slice(0, keys)
        scaled, dy = q[at] * scale, dcontext[at]
        p = scores_of(scaled, k[seen], rows, diagonal, real, samples)
        p -= highest[at]
        np.exp(p, out=p)
        p *= inverse[at]                                               # the final probabilities
        mask, dropped = mask_of(site, at, p), p
        if mask is not None:
            dropped, dy = p * mask.keep, dy * mask.scale
        dv[seen] += together(dropped).swapaxes(2, 3) @ together(dy)
        dp = (together(dy) @ v[seen].swapaxes(2, 3)).reshape(p.shape)
        if mask is not None:
            dp *= mask.keep
        dp -= along[at]                                                # forward: p = softmax(scores)
        dp *= p
        dq[at] = (together(dp) @ k[seen]).reshape(dy.shape) * scale    # forward: scores = q k^T / sqrt(d)
        dk[seen] += together(dp).swapaxes(2, 3) @ together(scaled)
    return tuple(x.reshape(b, -1, x.shape[-2], d).swapaxes(1, 2) for x in gradients)


def by_groups(x, k):
    """View x [b, n, a, d] as [b, g, a/g, n, d], for k [b, m, g, d]."""
    b, n, _, d = x.shape
    return x.swapaxes(1, 2).reshape(b, k.shape[2], -1, n, d)


def together(x):
    """View x [b, g, a/g, n, m] as [b, g, a/g n, m]: one product for all heads that share keys."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def tiles(q, k, diagonal):
    """Yield tiles of q [b, g, a/g, n, d] that leave room for their scores, and the number of keys that they may see."""
    (b, g, each, n, _), m = q.shape, k.shape[-2]
    for start in range(0, n, blockwise.ROWS):
        rows = slice(start, min(start + blockwise.ROWS, n))
        keys = rows.stop if diagonal else m
        fit = max(1, ROOM // ((rows.stop - start) * keys * each))
        for i, j in product(range(0, b, max(1, fit // g)), range(0, g, fit)):
            yield (slice(i, i + max(1, fit // g)), slice(j, j + fit), slice(None), rows), keys


def scores_of(scaled, k, rows, diagonal, real, samples):
    """Return the scores of a tile's queries, scaled [b, g, a/g, n, d], with its keys [b, g, m, d]."""
    p = (together(scaled) @ k.swapaxes(2, 3)).reshape(*scaled.shape[:-1], k.shape[-2])
    if diagonal:                                                       # the last columns are the rows' own positions
        own = rows.stop - rows.start
        p[..., rows.start:] += blockwise.FUTURE[:own, :own]
    if real is not None:
        hidden = np.arange(k.shape[-2]) >= real[samples, None]
        p += np.where(hidden, -np.inf, 0).astype(p.dtype)[:, None, None, None]
    return p


def mask_of(site, at, p):
    """Draw the Mask of a tile's probabilities [b, g, a/g, n, m], in their shape; None without a site."""
    if site is None:
        return None
    samples, groups, _, rows = at
    b, g, each, n, m = p.shape
    mask = draw_mask(site.moved(samples.start, groups.start * each, rows.start), (b, g * each, n, m), p)
    return mask._replace(keep=mask.keep.reshape(p.shape))
