"""The local math of reference/ops.py, made fast where that is worth it, under the same names.

NumPy arrays take the spelling of cpu.py if there is one; arrays of another library take the textbook's. With arrays of
two-byte formats either computes in float32, by half.py.
"""
from functools import wraps

import numpy as np

from mpi_impl.arrays import is_half, widened
from mpi_impl.kernels import cpu, half
from reference import ops
from reference.ops import lookup, rows

__all__ = ["ACTIVATIONS", "accumulate", "attention_core", "attention_core_again", "attention_core_backward", "dropout",
           "dropout_backward", "exp_and_sum", "layer_norm", "layer_norm_backward", "linear", "lookup",
           "lookup_backward", "rotate", "rotate_backward", "rows", "total"]


def chosen(plain):
    """The spelling for the arrays among the arguments: for their library, and for their format."""
    name = plain.__name__

    @wraps(plain)
    def choose(*arguments):
        library = cpu if any(isinstance(x, np.ndarray) for x in arguments) else ops
        if any(map(is_half, arguments)):
            return getattr(half, name)(library, *arguments)
        return getattr(library, name)(*arguments)

    return choose


linear, rotate, rotate_backward = chosen(ops.linear), chosen(ops.rotate), chosen(ops.rotate_backward)
layer_norm, layer_norm_backward = chosen(ops.layer_norm), chosen(ops.layer_norm_backward)
dropout, dropout_backward = chosen(ops.dropout), chosen(ops.dropout_backward)
attention_core, attention_core_backward = chosen(ops.attention_core), chosen(ops.attention_core_backward)
ACTIVATIONS = {name: tuple(map(chosen, pair)) for name, pair in ops.ACTIVATIONS.items()}


def attention_core_again(inputs):
    """CoreInputs -> the cache of attention_core. Of halves it is the inputs: the backward's kernel does the rest."""
    return inputs if is_half(inputs.q) else attention_core(*inputs)[1]


# ---- what is added to gradients, which are float32 where dy is of halves ----


def accumulate(grad, x, dy):
    """The sink that does not wait: grad [n, m] += x^T dy, over all positions of x [..., n] and dy [..., m]."""
    grad += rows(widened(x)).T @ rows(widened(dy))


def total(dy):
    """dy [n, ...] -> its sum over n: what is added everywhere, as a bias is, has the sum of the gradients."""
    return widened(dy).sum(0)


def lookup_backward(dy, ids, dtable):
    library = cpu if isinstance(dtable, np.ndarray) else ops
    return library.lookup_backward(widened(dy), ids, dtable)


# ---- the loss ----


def exp_and_sum(logits, highest):
    """logits [b, s, n], highest [b, s]: overwrite the logits with exp(logits - highest) -> its sums over n, [b, s]."""
    if isinstance(logits, np.ndarray):
        return cpu.exp_and_sum(logits, highest)
    logits -= highest[..., None]
    return np.exp(logits, out=logits).sum(-1)
