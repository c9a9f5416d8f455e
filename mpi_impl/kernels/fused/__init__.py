"""Our own kernels in CUDA C++ (*.cu), each for several steps of the textbook, and the functions that call them.

Each function has the arguments and results of its namesake in reference/ops.py or plain.py, where its docstring is, for
arrays on a GPU and on the host: CuPy compiles the sources for a GPU, and core.py compiles them as plain C++ for a CPU's
core. Arrays of two-byte formats are read, computed in float32, and rounded once.
"""
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.kernels.fused.launcher import blocks_across, blocks_for, launch, packed, threads_for
from mpi_impl.kernels.fused.structs import runs_of, site_of
from mpi_impl.runtime.arrays import address, contiguous, is_half, on_device
from reference.ops import Mask

# The most blocks on a GPU: a few for each of its processors.
BLOCKS = 512        # of several rows each
FLAT_BLOCKS = 2048  # over a flat array


def number(dtype) -> np.dtype:
    """Return the dtype to compute in, for arrays of this one: float64 for itself, float32 for all others."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def count(x) -> int:
    """Return the number of rows."""
    return x.size // x.shape[-1]


# ---- on a core: products of a few rows, the gradient of a table ------------------------------------------------------


def few_rows(x, w):
    """Compute x [b, n] @ w [n, m], where w or its transpose is contiguous."""
    x, (n, m) = contiguous(x), w.shape
    if w.flags.c_contiguous:
        y = np.zeros((len(x), m), x.dtype)
        launch("few_rows.few_rows", x.dtype, 1, x, w, y, len(x), n, m)
    else:
        y = np.empty((len(x), m), x.dtype)
        launch("few_rows.few_rows_transposed", x.dtype, 1, x, w.T, y, len(x), n, m)
    return y


def lookup_backward(dy, ids, dtable):
    ids = ids.astype(np.int64, copy=False)
    launch("lookup.lookup_backward", dy.dtype, ids.size, contiguous(dy), contiguous(ids), dtable, dy.shape[-1])
    return dtable


# ---- rows -----------------------------------------------------------------------------------------------------------


def add_to(y, x):
    if not y.flags.c_contiguous:
        y += x
        return y
    x, width = contiguous(x), y.shape[-1]
    launch("rows.add_to", y.dtype, count(y), y, x, x.ndim == 1, width, packed(width, y, x))
    return y


def stack(parts):
    b, s, heads, d = parts[0].shape
    whole: Any = getattr(parts[0], "base", None)
    if getattr(whole, "shape", None) == (b, s, len(parts), heads, d) and all(
            (address(part), part.strides) == (address(there), there.strides)
            for part, there in zip(parts, (whole[:, :, i] for i in range(len(parts))))):
        return whole                # flash.py has made them so
    whole = np.empty_like(parts[0], shape=(b, s, len(parts), heads, d), order="C")
    for place, part in enumerate(map(contiguous, parts)):
        launch("rows.stack", part.dtype, b * s, part, whole, place, len(parts), heads * d,
               packed(heads * d, part, whole))
    return whole


# ---- GeLU, and the bias before it -----------------------------------------------------------------------------------


def gelu(x, bias=None, exact=False):
    """Apply GeLU to x + bias, which overwrites x. The cache is that sum and, except for halves, its factor."""
    x = contiguous(x) if bias is None else x
    y, gate = np.empty_like(x, order="C"), None if is_half(x) else np.empty_like(x, order="C")
    launch("activation.gelu", x.dtype, count(x), x, bias, y, gate, exact, x.shape[-1], packed(x.shape[-1], x, y, gate))
    return y, (x if gate is None else (x, gate))


def gelu_backward(dy, cache, exact=False):
    (x, gate), dy = (cache, None) if is_half(dy) else cache, contiguous(dy)
    dx = np.empty_like(dy)
    launch("activation.gelu_backward", dy.dtype, count(dy), dy, x, gate, dx, exact, dy.shape[-1],
           packed(dy.shape[-1], dy, x, gate, dx))
    return dx


def gelu_backward_and_sum(dy, cache, exact=False):
    """Return dx, and the sum of its rows: on a GPU, where another pass over dx would take time."""
    (x, gate), dy = (cache, None) if is_half(dy) else cache, contiguous(dy)
    dx, width = np.empty_like(dy), dy.shape[-1]
    wide = packed(width, dy, x, gate, dx)
    across = blocks_across(dy, width, wide)
    groups = max(1, min(count(dy), BLOCKS // across))
    partial = np.empty_like(dy, shape=(groups, width), dtype=number(dy.dtype))
    launch("activation.gelu_backward_and_sum", dy.dtype, groups * across, dy, x, gate, dx, partial, groups, exact,
           count(dy), width, wide)
    return dx, partial.sum(0)


def gelu_exact(x, bias=None):
    return gelu(x, bias, exact=True)


def gelu_exact_backward(dy, cache):
    return gelu_backward(dy, cache, exact=True)


GELUS = {"gelu": gelu, "gelu_exact": gelu_exact}


# ---- the gate of the MLP --------------------------------------------------------------------------------------------


def swiglu(x):
    """Apply the gate. The cache is x and, except for halves, the gate's sigmoid."""
    x = contiguous(x)
    y = np.empty_like(x, shape=(*x.shape[:-2], x.shape[-1]), order="C")
    sigmoid, f = None if is_half(x) else np.empty_like(y), y.shape[-1]
    launch("activation.swiglu", x.dtype, count(y), x, y, sigmoid, f, packed(f, x, y, sigmoid))
    return y, (x if sigmoid is None else (x, sigmoid))


def swiglu_backward(dy, cache):
    (x, sigmoid), dy = (cache, None) if is_half(dy) else cache, contiguous(dy)
    dx, f = np.empty_like(x), dy.shape[-1]
    launch("activation.swiglu_backward", dy.dtype, count(dy), dy, x, sigmoid, dx, f, packed(f, dy, x, sigmoid, dx))
    return dx


# ---- dropout, the residual sum, layer norm --------------------------------------------------------------------------


class Normed(NamedTuple):
    """The arrays that a norm writes."""

    y: object             # [..., h]
    normed: object        # [..., h], before weight and bias
    inverse_std: object   # [..., 1], a number

    @classmethod
    def like(cls, x):
        return cls(np.empty_like(x, order="C"), np.empty_like(x, order="C"),
                   np.empty_like(x, shape=(*x.shape[:-1], 1), dtype=number(x.dtype), order="C"))


def add_and_norm(x, residual, site, norm=None):
    """Add dropout(x) [b, s, h] and the residual -> the sum, and dropout's Mask.

    Normalize the sum if `norm` is not None but (weight, bias, epsilon, Normed).
    """
    x, residual = contiguous(x), None if residual is None else contiguous(residual)
    total = None if site is None and residual is None else np.empty_like(x)
    keep = None if site is None else np.empty_like(x, dtype=bool)
    weight, bias, epsilon, into = norm or (None, None, 0.0, (None,) * 3)
    wide = packed(x.shape[-1], x, residual, total, *into[:2])
    threads = _, together = threads_for(x, x.shape[-1], wide)
    launch("layer_norm.add_and_norm", x.dtype, -(-count(x) // together), x, residual, total, keep,
           site_of(site, x.shape), weight, bias, *into, float(epsilon), count(x), x.shape[-1], wide, threads=threads)
    return x if total is None else total, None if site is None else Mask(keep, site.scale)


def dropout(x, site):
    return (x, None) if site is None else add_and_norm(x, None, site)


def dropout_backward(dy, mask):
    if mask is None:
        return dy
    dy = contiguous(dy)
    dx = np.empty_like(dy)
    launch("layer_norm.dropout_backward", dy.dtype, count(dy), dy, mask.keep, float(mask.scale), dx, dy.shape[-1])
    return dx


def add_branch(y, x, site):
    return add_and_norm(y, x, site)


def add_branch_and_norm(y, x, site, weight, bias, epsilon):
    into = Normed.like(y)
    return add_and_norm(y, x, site, (weight, bias, epsilon, into)), (into.y, tuple(into[1:]))


def layer_norm(x, weight, bias, epsilon):
    into = Normed.like(x)
    add_and_norm(x, None, None, (weight, bias, epsilon, into))
    return into.y, tuple(into[1:])


def layer_norm_backward(dy, weight, cache, around=None):
    dx, (dweight, dbias) = norm_backward("layer_norm.layer_norm_backward", dy, weight, cache, around, sums=2)
    return dx, dweight, dbias


def norm_backward(kernel, dy, weight, cache, around, sums):
    """Launch this kernel -> dx, and the `sums` of columns that give the gradients of the tensors, [sums, h]."""
    (normed, inverse), dy, h = cache, contiguous(dy), dy.shape[-1]
    around = None if around is None else contiguous(around)
    dx = np.empty_like(dy)
    wide = packed(h, dy, normed, around, dx)
    threads = _, together = threads_for(dy, h, wide)
    blocks = min(-(-count(dy) // together), BLOCKS) if on_device(dy) else 1
    partial = np.empty_like(dy, shape=(blocks * together, sums, h), dtype=number(dy.dtype))
    launch(kernel, dy.dtype, blocks, dy, weight, normed, inverse, around, dx, partial, count(dy), h, wide,
           threads=threads)
    return dx, partial.sum(0)


# ---- RMS norm -------------------------------------------------------------------------------------------------------


def rms_norm(x, weight, epsilon):
    x, (y, normed, inverse_rms), h = contiguous(x), Normed.like(x), x.shape[-1]
    wide = packed(h, x, y, normed)
    threads = _, together = threads_for(x, h, wide)
    launch("rms_norm.rms_norm", x.dtype, -(-count(x) // together), x, weight, y, normed, inverse_rms, float(epsilon),
           count(x), h, wide, threads=threads)
    return y, (normed, inverse_rms)


def rms_norm_backward(dy, weight, cache, around=None):
    dx, (dweight,) = norm_backward("rms_norm.rms_norm_backward", dy, weight, cache, around, sums=1)
    return dx, dweight


# ---- rotary position embedding --------------------------------------------------------------------------------------


def rotate(x, angles, direction=1.0):
    (x, cos, sin), (_, s, heads, size), half = map(contiguous, (x, *angles)), x.shape, angles[0].shape[-1]
    y = np.empty_like(x)
    wide = packed(half, x, cos, sin, y) and packed(size, x)
    launch("rope.rotate", x.dtype, len(x) * s, x, cos, sin, y, direction, s, heads, half, size, wide,
           threads=threads_for(x, half, wide))
    return y


def rotate_backward(dy, angles):
    return rotate(dy, angles, -1.0)


# ---- the loss -------------------------------------------------------------------------------------------------------


def largest(logits):
    highest, n = np.empty_like(logits, shape=logits.shape[:-1], order="C"), logits.shape[-1]
    launch("softmax.largest", logits.dtype, count(logits), logits, highest, n, packed(n, logits))
    return highest


def exp_and_sum(logits, highest):
    """Compute statistics of halves as numbers."""
    total, n = np.empty_like(highest, dtype=number(logits.dtype)), logits.shape[-1]
    launch("softmax.exp_and_sum", logits.dtype, count(logits), logits, as_numbers(highest), total, is_half(logits), n,
           packed(n, logits))
    return logits, total.astype(highest.dtype, copy=False)


def cross_entropy_backward(kept, highest, total, dloss, ids, held):
    n = kept.shape[-1]
    launch("softmax.cross_entropy_backward", kept.dtype, count(kept), kept, as_numbers(highest), as_numbers(total),
           as_numbers(dloss), ids, held, is_half(kept), n, packed(n, kept))
    return kept


def as_numbers(x):
    return contiguous(x).astype(number(x.dtype), copy=False)


# ---- the optimizer --------------------------------------------------------------------------------------------------


def adam_update(states, grad, model, runs, factor, step, rate, config):
    """Go over all elements once."""
    (param, m, v), c = states, config
    corrected = rate / (1 - c.adam_beta1**step), 1 / (1 - c.adam_beta2**step)
    scalars = *corrected, c.adam_beta1, 1 - c.adam_beta1, c.adam_beta2, 1 - c.adam_beta2, c.adam_eps
    for some in runs_of(runs):
        launch("adam.adam", grad.dtype if model is None else model.dtype, blocks_for(param, FLAT_BLOCKS), param, grad,
               m, v, model, some, *map(float, (factor, *scalars, 1 - rate * c.weight_decay)))


def sum_of_squares(x):
    """Sum in float64."""
    sums = np.empty_like(x, shape=blocks_for(x, FLAT_BLOCKS), dtype=np.float64)
    launch("adam.sum_of_squares", x.dtype, sums.size, x, np.uint64(x.size), sums, packed(x.size, x))
    return sums.sum()


# ---- attention's probabilities --------------------------------------------------------------------------------------


def attention_probs(scores, dropped, keep, site, lengths, shape, where, scale, causal):
    """Turn rows of q k^T into probabilities, softmax(scale x them), in place; `where` (rows_of) locates them.

    shape [samples, heads, queries, keys] is that of the part, and lengths [samples] are its own. `dropped`, if it is
    given, gets what dropout at `site` lets through, in this shape; `keep` has the layout of the scores.
    """
    assert lengths is None or lengths.dtype == np.int64, "the kernel reads 8 bytes of each length"
    form = scores.dtype if dropped is None else dropped.dtype
    launch("softmax.attention_probs", form, prod(shape[:3]), scores, dropped, keep, site_of(site, shape), lengths,
           where, shape[1], scale, causal)


def attention_probs_backward(ddropped, probs, mask, shape, where, scale, dscores):
    """Compute dscores, the gradient of attention_probs's input, from that of its `dropped`.

    Both have this shape, and may be one array.
    """
    keep, kept_scale = mask or (None, 1.0)
    launch("softmax.attention_probs_backward", dscores.dtype, prod(shape[:3]), ddropped, probs, keep, where,
           float(kept_scale), scale, dscores)
