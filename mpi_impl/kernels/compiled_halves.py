"""Products and attention of halves on a core, compiled (fused/halves): of NumPy arrays of float16 and bfloat16.

Each function has the arguments and results of its namesake in reference/ops.py or plain.py, where its docstring is. It
reads 16 bits, sums in float32, and rounds once; the sums of gradients are float32.
"""
import numpy as np

from mpi_impl.kernels import fused, half, plain
from mpi_impl.kernels.blockwise import score_scale
from mpi_impl.kernels.fused.launcher import call
from mpi_impl.kernels.fused.structs import heads_of, product_of, site_of, whole_heads
from reference.ops import CoreInputs, rows

# ---- products -------------------------------------------------------------------------------------------------------


def linear(x, w, b=None):
    y = np.empty((*x.shape[:-1], w.shape[-1]), x.dtype)
    product("products.product", rows(x), w, b, rows(y))
    return y


def accumulate(grad, x, dy):
    left, right = rows(x).T, rows(dy)
    product("products.product_in_floats", left, right, grad, add=True)


def total(dy):
    """Multiply a row of ones by dy."""
    sums = np.empty((1, *dy.shape[1:]), np.float32)
    ones, flat = np.ones((1, len(dy)), dy.dtype), dy.reshape(len(dy), sums.size)
    product("products.product_in_floats", ones, flat, sums.reshape(1, -1))
    return sums[0]


def activated_linear(x, w, b, activation):
    y = linear(x, w, b)
    return half.relu(y) if activation == "relu" else fused.GELUS[activation](y)


def sum_in_rank_order(parts, op, out):
    if op != "sum" or not parts[0].flags.c_contiguous or not out.flags.c_contiguous:
        return plain.sum_in_rank_order(parts, op, out)
    call("sums.sum_in_rank_order", 1, parts, parts.strides[0] // parts.itemsize, len(parts), out, out.size)
    return out


def product(kernel: str, a, b, *others, add: bool = False) -> None:
    """Call a kernel for matrices a [m, k] and b [k, n]; the last of the others is the result."""
    a, b = neighbouring(a), neighbouring(b)
    call(kernel, 1, a, b, *others, product_of(a, b, others[-1], add))


def neighbouring(x):
    """Return x, or a copy if the elements of neither a row nor a column are neighbours."""
    return x if x.itemsize in x.strides else x.copy()


# ---- attention ------------------------------------------------------------------------------------------------------


def attention_core(q, k, v, causal, site=None, lengths=None):
    inputs = CoreInputs(whole_heads(q), whole_heads(k), whole_heads(v), causal, site, lengths)
    return attention(*inputs), inputs


def cached_attention(q, k, v):
    return attention(whole_heads(q), whole_heads(k), whole_heads(v), causal=True)


def attention(q, k, v, causal, site=None, lengths=None):
    """Compute the context [b, n, a, d] of queries at the last n of the positions of k and v [b, m, g, d]."""
    context = np.empty(q.shape, q.dtype)
    call("attention.attention", len(q) * k.shape[2], q, k, v, context, site_of(site, scores_of(q, k)), lengths,
         heads_of(q, k, v, context), score_scale(q), causal)
    return context


def attention_core_backward(dcontext, cache):
    (q, k, v, causal, site, lengths), dcontext = cache, whole_heads(dcontext)
    gradients = dq, dk, dv = tuple(np.empty(x.shape, x.dtype) for x in (q, k, v))
    call("attention.attention_backward", len(q) * k.shape[2], dcontext, q, k, v, site_of(site, scores_of(q, k)),
         lengths, *gradients, heads_of(q, k, v, dcontext), heads_of(dq, dk, dv, dcontext), score_scale(q), causal)
    return gradients


def scores_of(q, k) -> tuple[int, int, int, int]:
    """Return the shape of the scores, [b, a, queries, keys]."""
    return len(q), q.shape[2], q.shape[1], k.shape[1]
