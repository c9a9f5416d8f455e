"""Multi-head self-attention: whole, and sharded by heads over t ranks (Shoeybi et al. 2019, section 3, figure 3b).

Heads do not interact until the output projection, so a rank computes a/t heads from beginning to end: its columns of Q,
K and V, its own softmax, and the rows of the output projection that read its heads.
"""
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from reference.activations import Activation, Nested
from reference.layer_context import TRAINING
from reference.layers.core_attention import core_attention_backward, core_attention_forward
from reference.layers.layer import Layer
from reference.layers.rope import rotate, rotate_backward
from reference.ops import CoreInputs, linear, linear_backward, rows
from reference.params import bias, weight


@dataclass(frozen=True)
class Attention:
    """Tensors of self-attention, or their gradients. d is the size of one head; each of t ranks holds a/t heads."""

    w_qkv: Any   # [h, 3, a, d], split along axis 2
    b_qkv: Any   # [3, a, d], split along axis 1
    w_out: Any   # [h, h], split along axis 0: a head's d rows follow those of the head before it
    b_out: Any   # [h], replicated


class AttentionCache(NamedTuple):
    """The arrays of one rank's heads that the backward needs."""

    x: Any                                        # [b, s, h]
    core: Annotated[Any, Nested()]                # of core_attention; None in generation
    context: Annotated[Any, Activation(axis=2)]   # [b, s, h/t]
    rotary: Any                                   # cos and sin of the angles that q and k were turned by, or None


def attention_tensors(c):
    """Declare the tensors for a ModelConfig. Q, K and V are one matrix, sharded along its heads, not across Q|K|V."""
    h, a, d = c.hidden_size, c.num_attention_heads, c.head_size
    return Attention(weight((h, 3, a, d), c.init_method_std, split=2), bias((3, a, d), split=1),
                     weight((h, h), c.init_method_std / np.sqrt(2 * c.num_layers), split=0), bias((h,)))


def attention_forward(x, p, c, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h]. c is the ModelConfig, `context` is the layer's LayerContext.

    No token attends to padding. With selective recompute the core is not kept. In generation the layer appends its keys
    and values to its KVCache, and nothing is dropped or kept.
    """
    partial, cache = heads_forward(x, p, c, context)
    return partial + p.b_out, cache


def attention_backward(dy, p, cache, c):
    """Return dx [b, s, h] and the gradients, as an Attention, for dy [b, s, h]."""
    x, core, context, rotary = cache
    # forward: y = context @ w_out + b_out
    dcontext, dw_out, db_out = linear_backward(dy, context, p.w_out)
    # forward: context = core_attention(rotate(q), rotate(k), v)
    dq, dk, dv = core_attention_backward(dcontext.reshape(*x.shape[:2], *p.b_qkv.shape[1:]), core)
    if rotary is not None:
        dq, dk = rotate_backward(dq, rotary), rotate_backward(dk, rotary)
    # forward: q, k, v = x @ w_qkv + b_qkv
    dqkv = np.stack([dq, dk, dv], 2).reshape(*x.shape[:2], -1)           # [b, s, 3 h/t]
    dx, dw_qkv, db_qkv = linear_backward(dqkv, x, p.w_qkv.reshape(x.shape[-1], -1))
    return dx, Attention(dw_qkv.reshape(p.w_qkv.shape), db_qkv.reshape(p.b_qkv.shape), dw_out, db_out)


def heads_forward(x, p, c, context, first_head=0):
    """Compute the output [b, s, h] of the heads in p, all or a rank's shard, from x [b, s, h], before the bias."""
    (b, s, h), dropout, rotary = x.shape, context.dropout, context.rotary
    qkv = linear(x, p.w_qkv.reshape(h, -1), p.b_qkv.reshape(-1))         # [b, s, h] @ [h, 3 h/t] -> [b, s, 3 h/t]
    q, k, v = (part[:, :, 0] for part in np.split(qkv.reshape(b, s, *p.b_qkv.shape), 3, 2))   # each [b, s, a/t, d]
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    inputs = CoreInputs(q, k, v, c.causal, dropout and dropout.attention(first_head), context.lengths)
    attended, core = core_attention_forward(inputs, context)                  # [b, s, a/t, d]
    attended = attended.reshape(b, s, -1)
    return linear(attended, p.w_out), AttentionCache(x, core, attended, rotary)   # [b, s, h/t] @ [h/t, h] -> [b, s, h]


def sharded_attention_forward(xs, shards, c, region, context=TRAINING):
    """Map each rank's input x [b, s, h] to its output y [b, s, h]; both use the layout outside the region."""
    entered, partial, caches = region.enter(xs), [], []                  # f
    for rank, (x, p) in enumerate(zip(entered, shards)):
        y, cache = heads_forward(x, p, c, context, first_head=rank * p.b_qkv.shape[1])
        partial.append(y)
        caches.append(cache._replace(x=None))
    ys = [y + p.b_out for y, p in zip(region.leave(partial), shards)]    # g, and the bias once, after the sum
    return ys, (region.keep(xs, entered), caches)


def sharded_attention_backward(dys, shards, cache, c, region):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the region."""
    kept, caches = cache
    db_outs = [rows(dy).sum(0) for dy in dys]                            # forward: y = g(...) + b_out
    partial, grads = [], []
    for dy, p, x, one, db_out in zip(region.leave_backward(dys), shards, region.enter_again(kept), caches, db_outs):
        dx, grad = attention_backward(dy, p, one._replace(x=x), c)
        partial.append(dx)
        grads.append(replace(grad, b_out=db_out))
    return region.enter_backward(partial), grads


LAYER = Layer("attention", Attention, attention_tensors, attention_forward, attention_backward,
              sharded_attention_forward, sharded_attention_backward,
              order="input w_qkv b_qkv qkv q k v probs probs_mask context w_out partial output b_out",
              products={"w_qkv": ("input", "qkv"), "w_out": ("context", "partial")})
