"""Fast spellings for NumPy on one core: in place, tile by tile, so that a tile stays in the cache until it is done.

Each function takes, gives and means what its namesake in reference/ops.py does, where its docstring stands. What has
no spelling of its own here is the textbook's.
"""
from math import pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.arrays import TILE
from reference import counter_rng, ops
from reference.ops import Mask, rows

ATTENTION_ROWS = 128      # queries at a time; keys after the last of them are skipped


def __getattr__(name):
    return getattr(ops, name)


def tiles(*arrays):
    """The arrays [n, m], all cut alike into pieces of whole rows."""
    count, width = arrays[0].shape
    step = max(1, TILE // width)
    for start in range(0, count, step):
        yield [array[start:start + step] for array in arrays]


# ---- GeLU -----------------------------------------------------------------------------------------------------------


def gelu(x):
    y, tanh = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    for x_, y_, tanh_ in tiles(rows(x), rows(y), rows(tanh)):
        np.multiply(x_, x_, out=tanh_)
        tanh_ *= 0.044715 * sqrt(2 / pi)
        tanh_ += sqrt(2 / pi)
        tanh_ *= x_
        np.tanh(tanh_, out=tanh_)
        np.add(tanh_, 1, out=y_)
        y_ *= x_
        y_ *= 0.5
    return y, (x, tanh)


def gelu_backward(dy, cache):
    x, tanh = cache
    dx = np.empty(dy.shape, dy.dtype)
    for dx_, dy_, x_, tanh_ in tiles(rows(dx), rows(dy), rows(x), rows(tanh)):
        inner = x_ * x_
        inner *= 3 * 0.044715 * sqrt(2 / pi)
        inner += sqrt(2 / pi)
        inner *= x_
        np.multiply(tanh_, tanh_, out=dx_)
        np.subtract(1, dx_, out=dx_)
        dx_ *= inner
        dx_ += tanh_
        dx_ += 1
        dx_ *= dy_
        dx_ *= 0.5
    return dx


# ---- layer norm -----------------------------------------------------------------------------------------------------


def layer_norm(x, weight, bias, epsilon):
    y, normed = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    inverse_std = np.empty((*x.shape[:-1], 1), x.dtype)
    for x_, y_, normed_, inverse_std_ in tiles(rows(x), rows(y), rows(normed), rows(inverse_std)):
        np.subtract(x_, x_.mean(1, keepdims=True), out=normed_)
        np.multiply(normed_, normed_, out=y_)
        inverse_std_[...] = 1 / np.sqrt(y_.mean(1, keepdims=True) + epsilon)
        normed_ *= inverse_std_
        np.multiply(normed_, weight, out=y_)
        y_ += bias
    return y, (normed, inverse_std)


def layer_norm_backward(dy, weight, cache):
    normed, inverse_std = cache
    dx, dweight, dbias = np.empty(dy.shape, dy.dtype), np.zeros_like(weight), np.zeros_like(weight)
    for dx_, dy_, normed_, inverse_std_ in tiles(rows(dx), rows(dy), rows(normed), rows(inverse_std)):
        dbias += dy_.sum(0)
        scratch = dy_ * normed_
        dweight += scratch.sum(0)
        scratch *= weight
        along = scratch.mean(1, keepdims=True)
        np.multiply(dy_, weight, out=dx_)
        dx_ -= dx_.mean(1, keepdims=True)
        np.multiply(normed_, along, out=scratch)
        dx_ -= scratch
        dx_ *= inverse_std_
    return dx, dweight, dbias


# ---- dropout --------------------------------------------------------------------------------------------------------


def draw_mask(site, shape, like):
    if site is None:
        return None
    keep = np.empty(shape, bool)
    draw_rows(site, row_starts(site, shape, like).reshape(-1, 1), rows(keep))
    return Mask(keep, site.scale)


def dropout(x, site):
    mask = draw_mask(site, x.shape, x)
    return dropout_backward(x, mask), mask


def dropout_backward(dy, mask):
    if mask is None:
        return dy
    dx = np.empty(dy.shape, dy.dtype)
    for dx_, dy_, keep_ in tiles(rows(dx), rows(dy), rows(mask.keep)):
        np.multiply(dy_, mask.scale, out=dx_)
        np.copyto(dx_, 0, where=~keep_)         # times `keep_` would be faster, but infinity times 0 is no number
    return dx


def row_starts(site, shape, like):
    """uint64 [..., 1]: where each row of an array of this shape starts in the whole array. The indices ascend."""
    return counter_rng.indices((*shape[:-1], 1), site.whole, site.first, like)


def draw_rows(site, start, keep):
    """Fill keep [n, m], bool, for rows that start at the indices `start` [n, 1]: the bits of counter_rng.bits.

    An index has 64 bits, but along a row only its low word changes, so that 32-bit arithmetic does.
    """
    n, m = keep.shape
    column = np.arange(m, dtype=np.uint32)
    words = np.empty((min(n, max(1, TILE // m)), m), np.uint32)
    scratch = np.empty_like(words)
    for keep_, start_ in tiles(keep, start):
        x, scratch_ = words[:len(keep_)], scratch[:len(keep_)]
        low, high = (start_ & 0xFFFFFFFF).astype(np.uint32), (start_ >> 32).astype(np.uint32)
        np.add(low, column, out=x)
        x ^= site.key[0]
        scramble(x, scratch_)
        x += high[:1] if high[0] == high[-1] else high                # a number is added faster than a column
        x ^= site.key[1]
        scramble(x, scratch_)
        x += site.key[0]
        scramble(x, scratch_)
        np.greater_equal(x, site.threshold, out=keep_)
        carries = (low + column[-1:] < low)[:, 0]                     # rows in which the low word begins again at 0
        if carries.any():                                             # one row in 2^32 elements at most
            index = start_[carries] + column
            keep_[carries] = counter_rng.bits(site.key, index) >= site.threshold


def scramble(x, scratch):
    """counter_rng.scramble, in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        np.right_shift(x, shift, out=scratch)
        x ^= scratch
        x *= factor
    np.right_shift(x, 16, out=scratch)
    x ^= scratch


# ---- attention ------------------------------------------------------------------------------------------------------


class AttentionCore(NamedTuple):
    """Unlike the textbook's: q, k and v as they came, so that nothing is copied."""

    q: Any         # [b, s, a, d]
    k: Any
    v: Any
    probs: Any     # [b, a, s, s]
    causal: bool   # probs above the diagonal are 0
    mask: Any      # a Mask of probs, not drawn above the diagonal; or None


def attention_core(q, k, v, causal, site=None):
    b, s, a, d = q.shape
    context, probs, mask = np.empty(q.shape, q.dtype), np.zeros((b, a, s, s), q.dtype), None
    if site is not None:
        mask, starts = Mask(np.zeros(probs.shape, bool), site.scale), row_starts(site, probs.shape, q)
    for i, j, block, keys in attention_blocks(b, s, a, causal):
        p = probs[i, j, block, :keys]
        np.matmul(q[i, block, j], k[i, :keys, j].T, out=p)            # [rows, d] @ [d, keys] -> [rows, keys]
        p *= 1 / sqrt(d)
        if causal:                                                    # the last columns are the rows' own positions
            p[:, block.start:] += FUTURE[:keys - block.start, :keys - block.start]
        p -= p.max(1, keepdims=True)
        np.exp(p, out=p)
        p /= p.sum(1, keepdims=True)
        if mask is not None:
            keep = mask.keep[i, j, block, :keys]
            draw_rows(site, starts[i, j, block], keep)
            p = p * keep                                              # the scale comes last, where there is less to do
        np.matmul(p, v[i, :keys, j], out=context[i, block, j])        # [rows, keys] @ [keys, d] -> [rows, d]
    if mask is not None:
        context *= mask.scale
    return context, AttentionCore(q, k, v, probs, causal, mask)


def attention_core_backward(dcontext, cache):
    q, k, v, probs, causal, mask = cache
    b, s, a, d = q.shape
    dq, dk, dv = np.empty(q.shape, q.dtype), np.zeros(q.shape, q.dtype), np.zeros(q.shape, q.dtype)
    for i, j, block, keys in attention_blocks(b, s, a, causal):
        p, dy = probs[i, j, block, :keys], dcontext[i, block, j]
        dropped = p
        if mask is not None:
            keep = mask.keep[i, j, block, :keys]
            dropped, dy = p * keep, dy * mask.scale
        dv[i, :keys, j] += dropped.T @ dy
        dp = dy @ v[i, :keys, j].T                                    # forward: context = dropped @ v * scale
        if mask is not None:
            dp *= keep                                                # forward: dropped = p * keep
        dp -= np.einsum("ij,ij->i", dp, p)[:, None]                   # forward: p = softmax(scores)
        dp *= p
        dp *= 1 / sqrt(d)
        np.matmul(dp, k[i, :keys, j], out=dq[i, block, j])            # forward: scores = q k^T / sqrt(d)
        dk[i, :keys, j] += dp.T @ q[i, block, j]
    return dq, dk, dv


def attention_blocks(b, s, a, causal):
    """For each sample, head and block of queries: how many keys, from the first on, they may see."""
    for i in range(b):
        for j in range(a):
            for start in range(0, s, ATTENTION_ROWS):
                end = min(start + ATTENTION_ROWS, s)
                yield i, j, slice(start, end), end if causal else s


FUTURE = np.triu(np.full((ATTENTION_ROWS, ATTENTION_ROWS), -np.inf, np.float32), 1)   # added to scores: hides them
