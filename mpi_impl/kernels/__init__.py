"""The local math of reference/ops.py, made fast under the same names; the table below says which function runs where.

`kernels.linear(x, w)` asks for the library and the format of x, its first argument, and calls the function that stands
in that column of linear's row.
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpi_impl.kernels import blockwise, compiled, compiled_halves, cpu, cuda, fused, half, partial_attention, plain
from mpi_impl.kernels.fused import core
from mpi_impl.kernels.fused.launcher import NAMES
from mpi_impl.runtime.arrays import is_half
from reference import ops
from reference.layers import online_softmax, rope


class Kernel(NamedTuple):
    """A row of the table: one function's implementations."""

    textbook: Callable        # arrays of any other library, as the tests' spies are
    numpy: Callable           # NumPy arrays of float32 and float64, without a C++ compiler
    half: Callable            # NumPy arrays of float16 and bfloat16, without one
    compiled: Callable        # NumPy arrays of float32 and float64, with one
    compiled_half: Callable   # NumPy arrays of float16 and bfloat16, with one
    cuda: Callable            # CuPy arrays on a GPU, of all four formats

    def __call__(self, x, *others):
        return self[column(x)](x, *others)


TEXTBOOK, NUMPY, HALF, COMPILED, COMPILED_HALF, CUDA = range(6)


def column(x) -> int:
    """Find the column for an array; for a tuple or list of arrays, that of the first. Integers are like float32."""
    if isinstance(x, np.ndarray):
        return (NUMPY, HALF, COMPILED, COMPILED_HALF)[2 * core.works(NAMES.get(x.dtype, "float32")) + is_half(x)]
    if cuda.has_kernels_for(x):
        return CUDA
    return column(x[0]) if isinstance(x, (tuple, list)) else TEXTBOOK


def describe(form: str) -> str:
    """Describe the kernels in use on CPU cores, for a model that computes in this format."""
    work = "element-wise work and products of 16 bits are" if form in core.HALVES else "element-wise work is"
    return f"{work} done by " + (
        "kernels compiled for this machine" if core.works(form) else
        "NumPy; with a C++ compiler and a writable cache folder, it would be several times as fast")


# ---- two kernels in turn, where no single one does the work of both ----


def drop_then_add(y, x, site):
    """Compute dropout(y) + x, of one shape, in place of y -> the sum, and dropout's mask."""
    y, mask = dropout(y, site)
    y += x
    return y, mask


def add_then_norm(y, x, site, weight, bias, epsilon):
    """Return what add_branch returns, and what layer_norm returns for the sum."""
    summed, mask = add_branch(y, x, site)
    return (summed, mask), layer_norm(summed, weight, bias, epsilon)


def multiply_then_activate(x, w, b, activation):
    """Apply the activation function of this name to linear(x, w, b) -> the result and its cache."""
    return ACTIVATIONS[activation][0](linear(x, w, b))


def differentiate_then_sum(dy, cache, activation):
    """Return dx of activated_linear's activation, of this name; and its sum over all rows, the gradient of the bias."""
    dx = ACTIVATIONS[activation][1](dy, cache)
    return dx, total(rows(dx))


def repeat_core(inputs):
    """Make the cache of attention_core again, from its CoreInputs."""
    return attention_core(*inputs)[1]


# ---- the table: textbook, numpy, half, compiled, compiled_half, cuda -----------------------------------------------

lookup, rows = ops.lookup, ops.rows      # everywhere

linear = Kernel(ops.linear, cpu.linear, half.linear, compiled.linear, compiled_halves.linear, cuda.linear)
add_to = Kernel(plain.add_to, plain.add_to, plain.add_to, plain.add_to, fused.add_to, fused.add_to)
sum_in_rank_order = Kernel(plain.sum_in_rank_order, plain.sum_in_rank_order, plain.sum_in_rank_order,
                           plain.sum_in_rank_order, compiled_halves.sum_in_rank_order, plain.sum_in_rank_order)
stack = Kernel(plain.stack, plain.stack, plain.stack, plain.stack, plain.stack, fused.stack)
accumulate = Kernel(plain.accumulate, plain.accumulate, plain.accumulate, compiled.accumulate,
                    compiled_halves.accumulate, cuda.accumulate)
total = Kernel(plain.total, cpu.total, plain.total, cpu.total, compiled_halves.total, cuda.total)
lookup_backward = Kernel(ops.lookup_backward, cpu.lookup_backward, half.lookup_backward, fused.lookup_backward,
                         fused.lookup_backward, cuda.lookup_backward)

gelu = Kernel(ops.gelu, cpu.gelu, half.gelu, fused.gelu, fused.gelu, fused.gelu)
gelu_backward = Kernel(ops.gelu_backward, cpu.gelu_backward, half.gelu_backward, fused.gelu_backward,
                       fused.gelu_backward, fused.gelu_backward)
gelu_exact = Kernel(ops.gelu_exact, ops.gelu_exact, half.gelu_exact, fused.gelu_exact, fused.gelu_exact,
                    fused.gelu_exact)
gelu_exact_backward = Kernel(ops.gelu_exact_backward, ops.gelu_exact_backward, half.gelu_exact_backward,
                             fused.gelu_exact_backward, fused.gelu_exact_backward, fused.gelu_exact_backward)
relu = Kernel(ops.relu, ops.relu, half.relu, ops.relu, half.relu, half.relu)
relu_backward = Kernel(ops.relu_backward, ops.relu_backward, half.relu_backward, ops.relu_backward, half.relu_backward,
                       half.relu_backward)
swiglu = Kernel(ops.swiglu, cpu.swiglu, half.swiglu, fused.swiglu, fused.swiglu, fused.swiglu)
swiglu_backward = Kernel(ops.swiglu_backward, cpu.swiglu_backward, half.swiglu_backward, fused.swiglu_backward,
                         fused.swiglu_backward, fused.swiglu_backward)
activated_linear = Kernel(multiply_then_activate, multiply_then_activate, multiply_then_activate,
                          compiled.activated_linear, compiled_halves.activated_linear, cuda.activated_linear)
activation_backward = Kernel(differentiate_then_sum, differentiate_then_sum, differentiate_then_sum,
                             differentiate_then_sum, differentiate_then_sum, cuda.activation_backward)

layer_norm = Kernel(ops.layer_norm, cpu.layer_norm, half.layer_norm, fused.layer_norm, fused.layer_norm,
                    fused.layer_norm)
layer_norm_backward = Kernel(plain.layer_norm_backward, cpu.layer_norm_backward, half.layer_norm_backward,
                             fused.layer_norm_backward, fused.layer_norm_backward, fused.layer_norm_backward)
rms_norm = Kernel(ops.rms_norm, cpu.rms_norm, half.rms_norm, fused.rms_norm, fused.rms_norm, fused.rms_norm)
rms_norm_backward = Kernel(plain.rms_norm_backward, cpu.rms_norm_backward, half.rms_norm_backward,
                           fused.rms_norm_backward, fused.rms_norm_backward, fused.rms_norm_backward)
dropout = Kernel(ops.dropout, cpu.dropout, half.dropout, fused.dropout, fused.dropout, fused.dropout)
dropout_backward = Kernel(ops.dropout_backward, cpu.dropout_backward, half.dropout_backward, fused.dropout_backward,
                          fused.dropout_backward, fused.dropout_backward)
add_branch = Kernel(drop_then_add, drop_then_add, drop_then_add, fused.add_branch, fused.add_branch, fused.add_branch)
add_branch_and_norm = Kernel(add_then_norm, add_then_norm, add_then_norm, fused.add_branch_and_norm,
                             fused.add_branch_and_norm, fused.add_branch_and_norm)

rotate = Kernel(rope.rotate, rope.rotate, half.rotate, fused.rotate, fused.rotate, fused.rotate)
rotate_backward = Kernel(rope.rotate_backward, rope.rotate_backward, half.rotate_backward, fused.rotate_backward,
                         fused.rotate_backward, fused.rotate_backward)
attention_core = Kernel(ops.attention_core, blockwise.attention_core, half.attention_core, compiled.attention_core,
                        compiled_halves.attention_core, cuda.attention_core)
attention_core_again = Kernel(repeat_core, repeat_core, half.attention_core_again, repeat_core,
                              half.attention_core_again, cuda.attention_core_again)
attention_core_backward = Kernel(ops.attention_core_backward, blockwise.attention_core_backward,
                                 half.attention_core_backward, compiled.attention_core_backward,
                                 compiled_halves.attention_core_backward, cuda.attention_core_backward)
cached_attention = Kernel(ops.cached_attention, blockwise.cached_attention, half.cached_attention,
                          blockwise.cached_attention, compiled_halves.cached_attention, cuda.cached_attention)

block_attention = Kernel(online_softmax.block_attention, partial_attention.block_attention,
                         partial_attention.block_attention, partial_attention.block_attention,
                         partial_attention.block_attention, cuda.block_attention)
block_attention_backward = Kernel(online_softmax.block_attention_backward, partial_attention.block_attention_backward,
                                  partial_attention.block_attention_backward,
                                  partial_attention.block_attention_backward,
                                  partial_attention.block_attention_backward, cuda.block_attention_backward)

largest = Kernel(plain.largest, plain.largest, plain.largest, plain.largest, fused.largest, fused.largest)
exp_and_sum = Kernel(plain.exp_and_sum, cpu.exp_and_sum, half.exp_and_sum, fused.exp_and_sum, fused.exp_and_sum,
                     fused.exp_and_sum)
cross_entropy_backward = Kernel(plain.cross_entropy_backward, plain.cross_entropy_backward, half.cross_entropy_backward,
                                fused.cross_entropy_backward, fused.cross_entropy_backward,
                                fused.cross_entropy_backward)

adam_update = Kernel(plain.adam_update, plain.adam_update, plain.adam_update, compiled.adam_update, fused.adam_update,
                     fused.adam_update)
sum_of_squares = Kernel(plain.sum_of_squares, plain.sum_of_squares, plain.sum_of_squares, plain.sum_of_squares,
                        plain.sum_of_squares, fused.sum_of_squares)

ACTIVATIONS = {"gelu": (gelu, gelu_backward), "gelu_exact": (gelu_exact, gelu_exact_backward),
               "relu": (relu, relu_backward)}
