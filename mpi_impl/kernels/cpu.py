"""Fast NumPy on one core: in place, tile by tile, so that a tile stays in the cache until it is done.

Each function has the arguments and results of its namesake in reference/ops.py or plain.py, where its docstring is.
"""
from itertools import product
from math import pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.runtime.arrays import TILE
from reference import counter_rng, ops
from reference.ops import Mask, rows

ATTENTION_ROWS = 64       # queries at a time; keys after the last of them are skipped


def tiles(*arrays, elements=None):
    """Split all arrays [..., n] into the same pieces of whole rows, by default with TILE elements of the first."""
    flat = [rows(x) for x in arrays]
    step = max(1, (elements or TILE) // flat[0].shape[1])
    for start in range(0, len(flat[0]), step):
        yield [x[start:start + step] for x in flat]


def empty(x, shape=None):
    """Return a contiguous array like x, without values: of x's library, format and, by default, shape."""
    return np.empty_like(x, order="C", shape=shape)


def linear(x, w, b=None):
    y = ops.linear(x, w)
    if b is not None:
        y += b
    return y


# ---- GeLU -----------------------------------------------------------------------------------------------------------


def gelu(x):
    """Compute x sigmoid(2 u), which is the textbook's x (1 + tanh(u)) / 2: NumPy's exp is twice as fast as its tanh."""
    y, sigmoid = empty(x), empty(x)
    with np.errstate(over="ignore"):                                  # far to the left: 1 / (1 + infinity) is 0
        for x_, y_, sigmoid_ in tiles(x, y, sigmoid):
            np.multiply(x_, x_, out=sigmoid_)
            sigmoid_ *= -2 * 0.044715 * sqrt(2 / pi)
            sigmoid_ -= 2 * sqrt(2 / pi)
            sigmoid_ *= x_
            np.exp(sigmoid_, out=sigmoid_)
            sigmoid_ += 1
            np.divide(1, sigmoid_, out=sigmoid_)
            np.multiply(x_, sigmoid_, out=y_)
    return y, (x, sigmoid)


def gelu_backward(dy, cache):
    x, sigmoid = cache
    dx = empty(dy)
    for dx_, dy_, x_, sigmoid_ in tiles(dx, dy, x, sigmoid):
        slope = x_ * x_                                               # of 2 u, times x
        slope *= 6 * 0.044715 * sqrt(2 / pi)
        slope += 2 * sqrt(2 / pi)
        slope *= x_
        np.subtract(1, sigmoid_, out=dx_)
        dx_ *= slope
        dx_ += 1
        dx_ *= sigmoid_
        dx_ *= dy_
    return dx


# ---- layer norm -----------------------------------------------------------------------------------------------------


def layer_norm(x, weight, bias, epsilon):
    """Compute means over a row as products with a column of 1/h: BLAS adds up a row faster than NumPy."""
    y, normed, h = empty(x), empty(x), x.shape[-1]
    inverse_std, mean = empty(x, (*x.shape[:-1], 1)), np.full_like(x, 1 / h, shape=(h, 1))
    for x_, y_, normed_, inverse_std_ in tiles(x, y, normed, inverse_std):
        np.subtract(x_, x_ @ mean, out=normed_)
        np.multiply(normed_, normed_, out=y_)
        np.divide(1, np.sqrt(y_ @ mean + x.dtype.type(epsilon)), out=inverse_std_)
        normed_ *= inverse_std_
        np.multiply(normed_, weight, out=y_)
        y_ += bias
    return y, (normed, inverse_std)


def layer_norm_backward(dy, weight, cache):
    normed, inverse_std = cache
    dx, dweight, dbias = empty(dy), np.zeros_like(weight), np.zeros_like(weight)
    weight_mean = (weight / dy.dtype.type(len(weight)))[:, None]      # dy @ this: the mean of dy * weight
    for dx_, dy_, normed_, inverse_std_ in tiles(dx, dy, normed, inverse_std):
        ones = np.ones_like(dy, shape=len(dy_))
        dbias += ones @ dy_
        scratch = dy_ * normed_
        dweight += ones @ scratch
        along = scratch @ weight_mean
        np.multiply(normed_, along, out=scratch)
        scratch += dy_ @ weight_mean
        np.multiply(dy_, weight, out=dx_)
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
    dx = empty(dy)
    for dx_, dy_, keep_ in tiles(dx, dy, mask.keep):
        np.multiply(dy_, mask.scale, out=dx_)
        np.copyto(dx_, 0, where=~keep_)         # times `keep_` would be faster, but infinity times 0 is no number
    return dx


def row_starts(site, shape, like):
    """Return where each row of an array of this shape starts in the whole array: uint64 [..., 1], ascending."""
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
    """Do in place what counter_rng.scramble does."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        np.right_shift(x, shift, out=scratch)
        x ^= scratch
        x *= factor
    np.right_shift(x, 16, out=scratch)
    x ^= scratch


# ---- attention ------------------------------------------------------------------------------------------------------


class BlockwiseAttentionCore(NamedTuple):
    """The cache of attention. Unlike the textbook's it has q, k and v as they came, so that nothing is copied."""

    q: Any         # [b, s, a, d]
    k: Any
    v: Any
    context: Any   # [b, s, a, d]: what was returned
    probs: Any     # [b, a, s, s]
    causal: bool   # probs above the diagonal are 0
    mask: Any      # a Mask of probs, not drawn wherever they are 0; or None
    lengths: Any   # [b]: probs of later keys are 0; or None


def attention_core(q, k, v, causal, site=None, lengths=None):
    b, s, a, d = q.shape
    context, probs, mask = empty(q), empty(q, (b, a, s, s)), None
    if site is not None:
        mask, starts = Mask(np.zeros(probs.shape, bool), site.scale), row_starts(site, probs.shape, q)
    core = BlockwiseAttentionCore(q, k, v, context, probs, causal, mask, lengths)
    scale, ones = q.dtype.type(score_scale(q)), np.ones_like(q, shape=(s, 1))
    q, k, v, y = heads_first(q, k, v, context)
    for samples, heads, block, keys in attention_blocks(b, s, a, causal, lengths):
        p = probs[samples, heads, block, :keys]
        k_transposed = k[samples, heads, :keys].swapaxes(2, 3)
        np.matmul(q[samples, heads, block] * scale, k_transposed, out=p)          # [rows, d] @ [d, keys]
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
        np.matmul(p, v[samples, heads, :keys], out=y[samples, heads, block])  # [rows, keys] @ [keys, d] -> [rows, d]
    if mask is not None:
        context *= mask.scale
    return context, core


def attention_core_backward(dcontext, cache):
    q, k, v, context, probs, causal, mask, lengths = cache
    b, s, a, d = q.shape
    gradients = dq, dk, dv = empty(q), np.zeros_like(q, order="C"), np.zeros_like(q, order="C")
    scale = q.dtype.type(score_scale(q))
    q, k, v, y, dcontext, dq, dk, dv = heads_first(q, k, v, context, dcontext, dq, dk, dv)
    for samples, heads, block, keys in attention_blocks(b, s, a, causal, lengths):
        p, dy = probs[samples, heads, block, :keys], dcontext[samples, heads, block]
        along = (dy * y[samples, heads, block]).sum(-1, keepdims=True)  # of dp * p: since y is p @ v, of dy * y
        dropped = p
        if mask is not None:
            keep = mask.keep[samples, heads, block, :keys]
            dropped, dy = p * keep, dy * dy.dtype.type(mask.scale)
        dv[samples, heads, :keys] += dropped.swapaxes(2, 3) @ dy
        dp = dy @ v[samples, heads, :keys].swapaxes(2, 3)             # forward: context = dropped @ v * scale
        if mask is not None:
            dp *= keep                                                # forward: dropped = p * keep
        dp -= along                                                   # forward: p = softmax(scores)
        dp *= p
        np.multiply(dp @ k[samples, heads, :keys], scale, out=dq[samples, heads, block])  # forward: q k^T / sqrt(d)
        dk[samples, heads, :keys] += dp.swapaxes(2, 3) @ (q[samples, heads, block] * scale)
    return gradients


def cached_attention(q, k, v):
    """Go block by block of queries, all samples and heads at a time: a new token has only one row in each."""
    n, m = q.shape[1], k.shape[1]
    context = empty(q)
    scale = q.dtype.type(score_scale(q))
    q, k, v, y = heads_first(q, k, v, context)
    for start in range(0, n, ATTENTION_ROWS):
        block = slice(start, min(start + ATTENTION_ROWS, n))
        keys, own = m - n + block.stop, block.stop - start            # how many are seen, the last of them in part
        p = (q[:, :, block] * scale) @ k[:, :, :keys].swapaxes(2, 3)  # [b, a, rows, d] @ [b, a, d, keys]
        p[..., keys - own:] += FUTURE[:own, :own]
        p -= np.maximum.reduce(p, axis=-1, keepdims=True)
        np.exp(p, out=p)
        p /= p.sum(-1, keepdims=True)
        np.matmul(p, v[:, :, :keys], out=y[:, :, block])              # [b, a, rows, keys] @ [b, a, keys, d]
    return context


def score_scale(q) -> float:
    """Return the factor of q k^T, for q [b, s, a, d]."""
    return 1 / sqrt(q.shape[-1])


def heads_first(*arrays):
    """View arrays [b, s, a, d] as [b, a, s, d]."""
    return [x.swapaxes(1, 2) for x in arrays]


def attention_blocks(b, s, a, causal, lengths=None, room=None):
    """Yield blocks of queries: slices of samples, heads and queries, and how many of the first keys they may see.

    A block has at most `room` probabilities (by default, what fits the cache), or those of one head.
    """
    room = room or 2 * TILE
    for start in range(0, s, ATTENTION_ROWS):
        end = min(start + ATTENTION_ROWS, s)
        keys = end if causal else s
        fit = max(1, room // ((end - start) * keys))
        for i, j in product(range(0, b, max(1, fit // a)), range(0, a, fit)):
            samples = slice(i, i + max(1, fit // a))
            real = keys if lengths is None else min(keys, int(lengths[samples].max()))
            yield samples, slice(j, j + fit), slice(start, end), real


FUTURE = np.triu(np.full((ATTENTION_ROWS, ATTENTION_ROWS), -np.inf, np.float32), 1)   # added to scores: hides them


# ---- vocabulary -----------------------------------------------------------------------------------------------------


def lookup_backward(dy, ids, dtable):
    """Add row by row: np.add.at takes several times as long."""
    for i, row in zip(ids.reshape(-1).tolist(), rows(dy)):
        dtable[i] += row
    return dtable


def exp_and_sum(logits, highest):
    total = empty(logits, highest.shape)
    for logits_, highest_, total_ in tiles(logits, highest[..., None], total[..., None]):
        logits_ -= highest_
        np.exp(logits_, out=logits_)
        np.add.reduce(logits_, axis=1, keepdims=True, out=total_)
    return total
