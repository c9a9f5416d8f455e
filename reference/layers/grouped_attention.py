"""Self-attention with fewer heads of keys and values than of queries: whole, and sharded by heads over t ranks.

Each of g heads of keys and values serves a group of a/g heads of queries (Ainslie et al. 2023; Shazeer 2019 for g = 1):
the KV cache of generation is a/g times smaller. Heads i a/g to (i + 1) a/g - 1 belong to group i, so that to shard both
along their heads leaves a group's queries with its keys and values.

If there are more ranks than groups, t/g neighbouring ranks hold the same head of keys and values, each with other
queries of its group. So each computes a part of that head's gradient, and the parts are summed over those ranks only.
It is the same with the norms of queries and keys, whose gains all heads share, and so all t ranks.

This is the attention of Llama, and of Qwen with biases of Q, K and V, or with the norms. GPT's is in attention.py.
"""
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from reference.activations import Activation, Nested
from reference.layer_context import TRAINING
from reference.layers.core_attention import core_attention_backward, core_attention_forward
from reference.layers.layer import Layer, declare, layer_backward, layer_forward
from reference.layers.rope import rotate, rotate_backward
from reference.ops import CoreInputs, NormCache, linear, linear_backward, rows
from reference.params import Tensor, bias, tree_map, weight


@dataclass(frozen=True)
class GroupedAttention:
    """Tensors of self-attention, or their gradients. d is the size of one head; each of t ranks holds a/t of Q and
    max(1, g/t) of K and V. What a model does without is None.
    """

    w_q: Any      # [h, a, d], split along axis 1
    b_q: Any      # [a, d], split along axis 0
    w_kv: Any     # [h, 2, g, d], split along axis 2 into at most g shards
    b_kv: Any     # [2, g, d], split along axis 1 into at most g shards
    q_norm: Any   # a norm's [d], in at most one shard: on every rank
    k_norm: Any   #   likewise
    w_out: Any    # [a d, h], split along axis 0
    b_out: Any    # [h], replicated


OF_HEADS = {"inside": True, "axis": 2}     # the norms of queries and keys, [b, s, heads, d]


class GroupedAttentionCache(NamedTuple):
    """The arrays of one rank's heads that the backward needs."""

    x: Any                                        # [b, s, h]
    q_norm: Annotated[Any, Nested("q_norm", NormCache, OF_HEADS)]                                # or None
    k_norm: Annotated[Any, Nested("k_norm", NormCache, OF_HEADS | {"of_keys": True})]             # or None
    core: Annotated[Any, Nested()]                # of core_attention; None in generation
    context: Annotated[Any, Activation(axis=2)]   # [b, s, a/t d]
    rotary: Any                                   # cos and sin of the angles that q and k were turned by, or None


def grouped_attention_tensors(c):
    """Declare the tensors for a ModelConfig. K and V are one matrix, sharded along its heads, not across K|V."""
    h, a, g, d, std = c.hidden_size, c.num_attention_heads, c.groups, c.head_size, c.init_method_std
    b_q = b_kv = norm = None
    if c.add_bias_linear or c.add_qkv_bias:
        b_q, b_kv = bias((a, d), split=0), Tensor((2, g, d), split=1, most_shards=g)
    if c.qk_layernorm:
        norm = tree_map(lambda tensor: replace(tensor, shape=(d,), split=0, most_shards=1), declare("norm", c))
    return GroupedAttention(weight((h, a, d), std, split=1), b_q,
                            replace(weight((h, 2, g, d), std, split=2), most_shards=g), b_kv, norm, norm,
                            weight((a * d, h), std / np.sqrt(2 * c.num_layers), split=0),
                            bias((h,)) if c.add_bias_linear else None)


def grouped_attention_forward(x, p, c, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h]. c is the ModelConfig, `context` the layer's LayerContext."""
    partial, cache = grouped_heads_forward(x, p, c, context)
    return add_bias(partial, p.b_out), cache


def grouped_attention_backward(dy, p, cache, c):
    """Return dx [b, s, h] and the gradients, as a GroupedAttention, for dy [b, s, h]."""
    x, q_norm, k_norm, core, attended, rotary = cache
    # forward: y = attended @ w_out + b_out
    dattended, dw_out, db_out = linear_backward(dy, attended, p.w_out)
    # forward: attended = core_attention(rotate(norm(q)), rotate(norm(k)), v)
    dq, dk, dv = core_attention_backward(dattended.reshape(*x.shape[:2], *p.w_q.shape[1:]), core)
    if rotary is not None:
        dq, dk = rotate_backward(dq, rotary), rotate_backward(dk, rotary)
    dq, dq_norm = head_norm_backward(dq, p.q_norm, q_norm)
    dk, dk_norm = head_norm_backward(dk, p.k_norm, k_norm)
    # forward: q = x @ w_q + b_q; k, v = x @ w_kv + b_kv
    dx_q, dw_q, db_q = projection_backward(dq, x, p.w_q, p.b_q)
    dx_kv, dw_kv, db_kv = projection_backward(np.stack([dk, dv], 2), x, p.w_kv, p.b_kv)
    return dx_q + dx_kv, GroupedAttention(dw_q, db_q, dw_kv, db_kv, dq_norm, dk_norm, dw_out,
                                          None if p.b_out is None else db_out)


def grouped_heads_forward(x, p, c, context, first_head=0):
    """Compute the output [b, s, h] of the heads in p, all or a rank's shard, from x [b, s, h], before the bias."""
    q = projection(x, p.w_q, p.b_q)                                           # [b, s, a/t, d]
    k, v = (part[:, :, 0] for part in np.split(projection(x, p.w_kv, p.b_kv), 2, 2))   # each [b, s, g/t, d]
    q, q_norm = head_norm(q, p.q_norm, c.layernorm_epsilon)
    k, k_norm = head_norm(k, p.k_norm, c.layernorm_epsilon)
    if context.rotary is not None:
        q, k = rotate(q, context.rotary), rotate(k, context.rotary)
    site = context.dropout and context.dropout.attention(first_head)
    attended, core = core_attention_forward(CoreInputs(q, k, v, c.causal, site, context.lengths), context)
    attended = attended.reshape(*x.shape[:2], -1)
    cache = GroupedAttentionCache(x, q_norm, k_norm, core, attended, context.rotary)
    return linear(attended, p.w_out), cache                                   # [b, s, a/t d] @ [a/t d, h] -> [b, s, h]


def sharded_grouped_attention_forward(xs, shards, c, region, context=TRAINING):
    """Map each rank's input x [b, s, h] to its output y [b, s, h]; both use the layout outside the region."""
    entered = region.enter(xs)                                                                         # f
    partial, caches = zip(*[grouped_heads_forward(x, p, c, context, first_head=rank * p.w_q.shape[1])
                            for rank, (x, p) in enumerate(zip(entered, shards))])
    ys = [add_bias(y, p.b_out) for y, p in zip(region.leave(list(partial)), shards)]                   # g
    return ys, (region.keep(xs, entered), [cache._replace(x=None) for cache in caches])


def sharded_grouped_attention_backward(dys, shards, cache, c, region):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the region.

    The gradients of tensors with copies are partial sums; the region completes them.
    """
    kept, caches = cache
    db_outs = [None if p.b_out is None else rows(dy).sum(0) for dy, p in zip(dys, shards)]
    partial, grads = [], []
    for dy, p, x, one, db_out in zip(region.leave_backward(dys), shards, region.enter_again(kept), caches, db_outs):
        dx, grad = grouped_attention_backward(dy, p, one._replace(x=x), c)
        partial.append(dx)
        grads.append(replace(grad, b_out=db_out))
    return region.enter_backward(partial), grads


LAYER = Layer("attention", GroupedAttention, grouped_attention_tensors, grouped_attention_forward,
              grouped_attention_backward, sharded_grouped_attention_forward, sharded_grouped_attention_backward,
              chosen=lambda c: c.grouped_attention,
              order="input w_q b_q queries w_kv b_kv keys_values q_norm:norm k_norm:norm q k v probs probs_mask "
                    "context w_out partial output b_out",
              products={"w_q": ("input", "queries"), "w_kv": ("input", "keys_values"), "w_out": ("context", "partial")})


# ---- what some models do without ------------------------------------------------------------------------------------


def projection(x, w, b):
    """Compute x [b, s, h] @ w [h, ..., d] + b [..., d] -> [b, s, ..., d]. The bias may be None."""
    return add_bias(linear(x, w.reshape(len(w), -1)).reshape(*x.shape[:2], *w.shape[1:]), b)


def projection_backward(dy, x, w, b):
    """Return dx, dw and db, or None for a bias that is None, for dy [b, s, ..., d]."""
    dx, dw, db = linear_backward(dy.reshape(*x.shape[:2], -1), x, w.reshape(len(w), -1))
    return dx, dw.reshape(w.shape), None if b is None else db.reshape(b.shape)


def add_bias(y, b):
    return y if b is None else y + b


def head_norm(x, p, epsilon):
    """Normalize each head of x [b, s, heads, d]; without a norm return x itself."""
    return (x, None) if p is None else layer_forward(x, p, epsilon)


def head_norm_backward(dy, p, cache):
    """Return dx and the gradients for dy [b, s, heads, d]."""
    return (dy, None) if p is None else layer_backward(dy, p, cache)
