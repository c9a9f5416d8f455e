"""Partial attention for context parallelism, on a GPU: the textbook's, in float32 at least."""
from mpi_impl.runtime.arrays import widened
from reference import online_softmax


def block_attention(q, k, v, diagonal, site=None, real=None):
    return online_softmax.block_attention(widened(q), widened(k), widened(v), diagonal, site, real)


def block_attention_backward(dcontext, along, highest, total, q, k, v, diagonal, site=None, real=None):
    return online_softmax.block_attention_backward(widened(dcontext), along, highest, total, widened(q), widened(k),
                                                   widened(v), diagonal, site, real)
