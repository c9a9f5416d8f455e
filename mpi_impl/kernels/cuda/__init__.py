"""Fast spellings for CuPy arrays on a CUDA GPU, in float64, float32 and the formats of two bytes.

Each function takes, gives and means what its namesake in reference/ops.py does, where its docstring stands; the caches
of halves keep inputs rather than what can be computed from them (kernels/half.py). What has no spelling of its own here
is the textbook's, or half.py's.

Matrix products are cuBLAS's (gemm.py), attention is cuDNN's where it can be (flash.py). For the rest there are kernels
of our own (kernels/fused).
"""
import numpy as np

from mpi_impl.kernels.cuda.attention import (attention_core, attention_core_again, attention_core_backward,
                                             cached_attention)
from mpi_impl.kernels.cuda.gemm import multiply
from mpi_impl.kernels.fused import (adam_update, add_branch, add_branch_and_norm, cross_entropy_backward, dropout,
                                    dropout_backward, exp_and_sum, gelu, gelu_backward, gelu_exact, gelu_exact_backward,
                                    layer_norm, layer_norm_backward, number, sum_of_squares)
from reference.ops import rows

__all__ = ["accumulate", "adam_update", "add_branch", "add_branch_and_norm", "attention_core",
           "attention_core_again", "attention_core_backward", "cached_attention", "cross_entropy_backward", "dropout",
           "dropout_backward", "exp_and_sum", "gelu", "gelu_backward", "gelu_exact", "gelu_exact_backward",
           "layer_norm", "layer_norm_backward", "linear", "linear_gelu", "linear_gelu_exact", "sum_of_squares", "total"]


def has_kernels_for(x) -> bool:
    """Whether x is an array of CuPy's. (To import CuPy for that would need it installed.)"""
    return type(x).__module__.partition(".")[0] == "cupy"


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
    return gelu(product(x, w), b)


def linear_gelu_exact(x, w, b):
    """Likewise of gelu_exact."""
    return gelu_exact(product(x, w), b)
