"""The local math of reference/ops.py, made fast where that is worth it, under the same names.

NumPy arrays take the spelling of cpu.py if there is one; arrays of another library take the textbook's.
"""
from functools import wraps

import numpy as np

from mpi_impl.kernels import cpu
from reference import ops
from reference.ops import linear, lookup, lookup_backward, rotate, rotate_backward, rows

__all__ = ["ACTIVATIONS", "accumulate", "attention_core", "attention_core_backward", "draw_mask", "dropout",
           "dropout_backward", "layer_norm", "layer_norm_backward", "linear", "lookup", "lookup_backward", "rotate",
           "rotate_backward", "rows"]


def fastest(plain):
    """The spelling for the library that the arrays among the arguments belong to."""
    fast = getattr(cpu, plain.__name__)

    @wraps(plain)
    def choose(*arguments, **named):
        on_cpu = any(isinstance(x, np.ndarray) for x in arguments)
        return fast(*arguments, **named) if on_cpu else plain(*arguments, **named)

    return choose


layer_norm, layer_norm_backward = fastest(ops.layer_norm), fastest(ops.layer_norm_backward)
draw_mask, dropout, dropout_backward = (fastest(f) for f in (ops.draw_mask, ops.dropout, ops.dropout_backward))
attention_core, attention_core_backward = fastest(ops.attention_core), fastest(ops.attention_core_backward)
ACTIVATIONS = ops.ACTIVATIONS | {"gelu": (fastest(ops.gelu), fastest(ops.gelu_backward))}


def accumulate(grad, x, dy):
    """The sink that does not wait: grad [n, m] += x^T dy, over all positions of x [..., n] and dy [..., m]."""
    grad += rows(x).T @ rows(dy)
