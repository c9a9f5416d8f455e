"""Fast spellings for CuPy arrays on a CUDA GPU, in float64, float32 and the formats of two bytes.

Each function takes, gives and means what its namesake in reference/ops.py does, where its docstring stands; those of
two bytes are read, computed in float32, and rounded once, and their caches keep inputs rather than what can be computed
from them (kernels/half.py). What has no spelling of its own here is the textbook's, or half.py's.

Matrix products are cuBLAS's (gemm.py), attention is cuDNN's where it can be (flash.py). The rest are kernels of our own
(*.cu), one for what the textbook does in several steps: each step would read and write all of its arrays.
"""
from typing import NamedTuple

import numpy as np

from mpi_impl.arrays import is_half
from mpi_impl.kernels.cuda.attention import attention_core, attention_core_again, attention_core_backward
from mpi_impl.kernels.cuda.gemm import multiply, number
from mpi_impl.kernels.cuda.launcher import THREADS, launch, packed, site_of
from reference.ops import Mask, rows

__all__ = ["accumulate", "adam_update", "add_branch", "add_branch_and_norm", "attention_core", "attention_core_again",
           "attention_core_backward", "cross_entropy_backward", "dropout", "dropout_backward", "exp_and_sum",
           "gelu_backward", "layer_norm", "layer_norm_backward", "linear", "linear_gelu", "sum_of_squares", "total"]

BLOCKS = 512        # where blocks take several rows each: a few for each of a GPU's processors


def has_kernels_for(x) -> bool:
    return type(x).__module__.partition(".")[0] == "cupy"


def count(x) -> int:
    """Of rows."""
    return x.size // x.shape[-1]


def contiguous(x):
    return x if x.flags.c_contiguous else x.copy()


# ---- linear, and GeLU behind it -------------------------------------------------------------------------------------


def linear(x, w, b=None):
    y = product(x, w)
    if b is not None:
        y += b
    return y


def product(x, w):
    """x [..., n] @ w [n, m] -> [..., m]."""
    y = np.empty_like(x, shape=(*x.shape[:-1], w.shape[-1]), order="C")
    multiply(rows(x), w, rows(y))
    return y


def accumulate(grad, x, dy):
    """The sink that does not wait: grad [n, m] += x^T dy, over all positions of x [..., n] and dy [..., m]."""
    multiply(rows(x).T, rows(dy), grad, add=True)


def total(dy):
    """dy [n, ...] -> its sum over n, in float32 for halves: a product with ones."""
    out = np.empty_like(dy, shape=(1, dy.size // len(dy)), dtype=number(dy.dtype), order="C")
    multiply(np.ones_like(dy, shape=(1, len(dy))), dy.reshape(len(dy), -1), out)
    return out.reshape(dy.shape[1:])


def linear_gelu(x, w, b):
    """gelu(linear(x, w, b)), and gelu's cache."""
    z = product(x, w)
    y, sigmoid = np.empty_like(z), None if is_half(z) else np.empty_like(z)
    launch("activation.gelu", z.dtype, count(z), z, b, y, sigmoid, z.shape[-1], packed(z.shape[-1], z, y, sigmoid))
    return y, (z if sigmoid is None else (z, sigmoid))


def gelu_backward(dy, cache):
    x, dy = cache if is_half(dy) else cache[0], contiguous(dy)
    dx = np.empty_like(dy)
    launch("activation.gelu_backward", dy.dtype, count(dy), dy, x, dx, dy.shape[-1], packed(dy.shape[-1], dy, x, dx))
    return dx


# ---- dropout, the residual sum, layer norm --------------------------------------------------------------------------


class Normed(NamedTuple):
    """What layer norm writes."""

    y: object             # [..., h]
    normed: object        # [..., h], before weight and bias
    inverse_std: object   # [..., 1], a number

    @classmethod
    def like(cls, x):
        return cls(np.empty_like(x, order="C"), np.empty_like(x, order="C"),
                   np.empty_like(x, shape=(*x.shape[:-1], 1), dtype=number(x.dtype)))


def add_and_norm(x, residual, site, norm=None):
    """x [b, s, h] -> dropout(x) + residual, and its Mask; norm, if there is one, is (weight, bias, epsilon, Normed)."""
    x, residual = contiguous(x), None if residual is None else contiguous(residual)
    total = None if site is None and residual is None else np.empty_like(x)
    keep = None if site is None else np.empty_like(x, dtype=bool)
    weight, bias, epsilon, into = norm or (None, None, 0.0, (None,) * 3)
    launch("layer_norm.add_and_norm", x.dtype, count(x), x, residual, total, keep, site_of(site, x.shape), weight, bias,
           *into, float(epsilon), x.shape[-1], packed(x.shape[-1], x, residual, total, *into[:2]))
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


def layer_norm_backward(dy, weight, cache):
    (normed, inverse_std), dy, h = cache, contiguous(dy), dy.shape[-1]
    dx, blocks = np.empty_like(dy), min(count(dy), BLOCKS)
    partial = np.zeros_like(dy, shape=(blocks, 2, h), dtype=number(dy.dtype))
    launch("layer_norm.layer_norm_backward", dy.dtype, blocks, dy, weight, normed, inverse_std, dx, partial, count(dy),
           h, packed(h, dy, normed, dx))
    dweight, dbias = partial.sum(0)
    return dx, dweight, dbias


# ---- the loss -------------------------------------------------------------------------------------------------------


def exp_and_sum(logits, highest):
    total = np.empty_like(highest)
    launch("softmax.exp_and_sum", logits.dtype, count(logits), logits, highest, total, logits.shape[-1],
           packed(logits.shape[-1], logits))
    return total


def cross_entropy_backward(probs, dloss, ids, held):
    launch("softmax.cross_entropy_backward", probs.dtype, count(probs), probs, contiguous(dloss), ids, held,
           probs.shape[-1], packed(probs.shape[-1], probs))
    return probs


# ---- the optimizer --------------------------------------------------------------------------------------------------


def adam_update(states, grad, model, runs, factor, step, rate, c):
    """One pass over each run. For the arguments see kernels.adam_update."""
    scalars = [c.adam_beta1, c.adam_beta2, c.adam_eps, 1 - c.adam_beta1**step, 1 - c.adam_beta2**step]
    for part, decays in runs:
        param, m, v = (x[part] for x in states)
        copy, count = None if model is None else model[part], param.size
        decay = 1 - rate * c.weight_decay if decays else 1
        launch("adam.adam", grad.dtype if model is None else model.dtype, -(-count // THREADS), param, grad[part], m, v,
               copy, np.uint64(count), *map(float, (factor, rate, *scalars, decay)))


def sum_of_squares(x):
    """Of the flat x -> a number on the device, in float64: nobody waits for it yet."""
    sums = np.zeros_like(x, shape=min(-(-x.size // THREADS), BLOCKS), dtype=np.float64)
    launch("adam.sum_of_squares", x.dtype, sums.size, x, np.uint64(x.size), sums)
    return sums.sum()
