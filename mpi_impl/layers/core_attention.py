"""Attention between one rank's queries, keys and values. Its textbook twin is reference/layers/core_attention.py."""
from mpi_impl.kernels import attention_core, attention_core_again, attention_core_backward, cached_attention
from mpi_impl.layers.context_attention import PartCache
from reference.ops import CoreInputs


def core_attention_forward(inputs: CoreInputs, context):
    """Map CoreInputs to the attended values [b, s, a/t, d], and return the cache. `context` is the LayerContext."""
    if context.part is not None:
        return context.part.attend(inputs, context.recompute)
    if context.kv_cache is not None:
        return context.kv_cache.attend(inputs.q, inputs.k, inputs.v, cached_attention), None
    attended, core = attention_core(*inputs)
    return attended, inputs if context.recompute.selective else core


def core_attention_backward(dattended, cache):
    """Return dq, dk and dv, in the shapes of q, k and v, for dattended [b, s, a/t, d]."""
    if isinstance(cache, PartCache):
        return cache.backward(dattended)
    return attention_core_backward(dattended, core_again(cache))


def core_again(core):
    """Return the core's cache as it was kept, or recompute it from the core's inputs."""
    return attention_core_again(core) if isinstance(core, CoreInputs) else core
