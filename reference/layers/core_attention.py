"""Attention between queries, keys and values that are there: in training, or in generation behind the KV cache.

The layers around it (attention.py, grouped_attention.py) make these from x, for the heads of one rank, and use the
result. It has no parameters, and heads do not interact.
"""
from reference.layers.context_attention import PartsCache
from reference.ops import CoreInputs, attention_core, attention_core_backward, cached_attention


def core_attention_forward(inputs, context):
    """Map CoreInputs to the attended values [b, s, a, d], and return the cache. `context` is the layer's LayerContext.

    With context parallelism the queries attend to keys of other ranks. With selective recompute the cache is the
    inputs. In generation the layer's KVCache gets the keys and values, and there is no cache for a backward.
    """
    if context.part is not None:
        return context.part.attend(inputs)
    if context.kv_cache is not None:
        return context.kv_cache.attend(inputs.q, inputs.k, inputs.v, cached_attention), None
    attended, core = attention_core(*inputs)
    return attended, inputs if context.recompute.selective else core


def core_attention_backward(dattended, cache):
    """Return dq, dk and dv, in the shapes of q, k and v, for dattended [b, s, a, d]."""
    if isinstance(cache, PartsCache):
        return cache.backward(dattended)
    return attention_core_backward(dattended, core_again(cache))


def core_again(core):
    """Return the core's cache as it was kept, or recompute it from its inputs (Korthikanti et al. 2022, section 5).

    Its size grows with s^2, and it takes few operations to recompute: nowhere else is so much memory so cheap.
    """
    return attention_core(*core)[1] if isinstance(core, CoreInputs) else core
