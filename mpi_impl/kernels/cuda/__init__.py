"""Kernels for CuPy arrays on a CUDA GPU, in float64, float32 and the formats of two bytes.

Each function has the arguments and results of its namesake in reference/ops.py or plain.py, where its docstring is;
of halves, caches keep inputs rather than what can be recomputed from them.

Matrix products are cuBLAS's (gemm.py), attention is cuDNN's where possible (flash.py). The rest is our own kernels
(kernels/fused).
"""
import numpy as np

from mpi_impl.kernels import fused, half
from mpi_impl.kernels.cuda.attention import (attention_core, attention_core_again, attention_core_backward,
                                             cached_attention)
from mpi_impl.kernels.cuda.gemm import multiply
from mpi_impl.kernels.cuda.partial_attention import block_attention, block_attention_backward
from mpi_impl.kernels.fused import number
from mpi_impl.runtime.arrays import counter_of
from reference import ops
from reference.ops import rows

__all__ = ["attention_core", "attention_core_again", "attention_core_backward", "block_attention",
           "block_attention_backward", "cached_attention"]

lookup_backward = half.rounding(ops.lookup_backward, half.AS_IS)


def has_kernels_for(x) -> bool:
    """Report whether x is a CuPy array, or one without data in its place. (Importing CuPy to ask would require it to be
    installed.)
    """
    return type(x).__module__.partition(".")[0] == "cupy" or counter_of(x) is not None


def linear(x, w, b=None):
    y = product(x, w)
    return y if b is None else fused.add_to(y, b)


def product(x, w):
    """Multiply x [..., n] @ w [n, m] -> [..., m]."""
    y = np.empty_like(x, shape=(*x.shape[:-1], w.shape[-1]), order="C")
    multiply(rows(x), w, rows(y))
    return y


def accumulate(grad, x, dy):
    multiply(rows(x).T, rows(dy), grad, add=True)


def total(dy):
    """Sum by a product with ones, in float32 for halves."""
    out = np.empty_like(dy, shape=(1, dy.size // len(dy)), dtype=number(dy.dtype), order="C")
    multiply(np.ones_like(dy, shape=(1, len(dy))), dy.reshape(len(dy), -1), out)
    return out.reshape(dy.shape[1:])


def activated_linear(x, w, b, activation):
    if activation == "relu":
        return half.relu(linear(x, w, b))
    return fused.GELUS[activation](product(x, w), b)


def activation_backward(dy, cache, activation):
    if activation == "relu":
        dx = half.relu_backward(dy, cache)
        return dx, total(rows(dx))
    return fused.gelu_backward_and_sum(dy, cache, activation == "gelu_exact")
