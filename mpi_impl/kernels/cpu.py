"""Fast NumPy on one core: in place, tile by tile, so that a tile stays in the cache until it is done. Most of it
serves where there is no C++ compiler.

Each function has the arguments and results of its namesake in reference/ops.py or plain.py, where its docstring is.
"""
from math import pi, sqrt

import numpy as np

from mpi_impl.kernels.plain import and_around
from mpi_impl.runtime.arrays import TILE
from reference import ops
from reference.ops import Mask, rows
from reference.random import counter_rng


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


def total(dy):
    """Multiply a row of ones by dy: BLAS adds rows up faster than NumPy."""
    return np.tensordot(np.ones_like(dy, shape=len(dy)), dy, 1)


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


# ---- the gate of the MLP --------------------------------------------------------------------------------------------


def swiglu(x):
    (*_, f), y = x.shape, empty(x, (*x.shape[:-2], x.shape[-1]))
    sigmoid = empty(y)
    with np.errstate(over="ignore"):                                  # far to the left: 1 / (1 + infinity) is 0
        for x_, y_, sigmoid_ in tiles(x.reshape(*y.shape[:-1], 2 * f), y, sigmoid):
            gate, up = x_[:, :f], x_[:, f:]
            np.negative(gate, out=sigmoid_)
            np.exp(sigmoid_, out=sigmoid_)
            sigmoid_ += 1
            np.divide(1, sigmoid_, out=sigmoid_)
            np.multiply(gate, sigmoid_, out=y_)
            y_ *= up
    return y, (x, sigmoid)


def swiglu_backward(dy, cache):
    (x, sigmoid), f = cache, dy.shape[-1]
    dx, flat = empty(x), (*dy.shape[:-1], 2 * f)
    for dx_, x_, dy_, sigmoid_ in tiles(dx.reshape(flat), x.reshape(flat), dy, sigmoid):
        gate, up, dgate, dup = x_[:, :f], x_[:, f:], dx_[:, :f], dx_[:, f:]
        np.multiply(gate, sigmoid_, out=dup)                          # silu
        np.subtract(1, sigmoid_, out=dgate)
        dgate *= dup
        dgate += sigmoid_                                             # its slope: sigmoid (1 + gate (1 - sigmoid))
        dgate *= up
        dgate *= dy_
        dup *= dy_
    return dx


# ---- layer norm, RMS norm -------------------------------------------------------------------------------------------


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


@and_around
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


def rms_norm(x, weight, epsilon):
    y, normed, h = empty(x), empty(x), x.shape[-1]
    inverse_rms, mean = empty(x, (*x.shape[:-1], 1)), np.full_like(x, 1 / h, shape=(h, 1))
    for x_, y_, normed_, inverse_rms_ in tiles(x, y, normed, inverse_rms):
        np.multiply(x_, x_, out=y_)
        np.divide(1, np.sqrt(y_ @ mean + x.dtype.type(epsilon)), out=inverse_rms_)
        np.multiply(x_, inverse_rms_, out=normed_)
        np.multiply(normed_, weight, out=y_)
    return y, (normed, inverse_rms)


@and_around
def rms_norm_backward(dy, weight, cache):
    normed, inverse_rms = cache
    dx, dweight = empty(dy), np.zeros_like(weight)
    weight_mean = (weight / dy.dtype.type(len(weight)))[:, None]      # dy @ this: the mean of dy * weight
    for dx_, dy_, normed_, inverse_rms_ in tiles(dx, dy, normed, inverse_rms):
        scratch = dy_ * normed_
        dweight += np.ones_like(dy, shape=len(dy_)) @ scratch
        np.multiply(normed_, scratch @ weight_mean, out=scratch)
        np.multiply(dy_, weight, out=dx_)
        dx_ -= scratch
        dx_ *= inverse_rms_
    return dx, dweight


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
    return logits, total
