"""Self-attention with groups of heads on one tensor-parallel rank. Twin: reference/layers/grouped_attention.py."""
import numpy as np

from mpi_impl.comm.reason import Reason
from mpi_impl.kernels import add_to, linear, rotate, rotate_backward, rows, stack, total
from mpi_impl.layers.core_attention import core_attention_backward, core_attention_forward
from mpi_impl.layers.layer import Layer, layer_backward, layer_forward
from reference.layer_context import TRAINING
from reference.layers.grouped_attention import GroupedAttention, GroupedAttentionCache
from reference.ops import CoreInputs

INPUT, OUTPUT = Reason("attention", "input"), Reason("attention", "output")


def grouped_attention_forward(x, p: GroupedAttention, c, region, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h], both outside the region. c is the ModelConfig."""
    entered = region.enter(x, INPUT)                                     # f
    q = projection(entered, p.w_q, p.b_q)                                # [b, s, a/t, d]
    k, v = (part[:, :, 0] for part in np.split(projection(entered, p.w_kv, p.b_kv), 2, 2))   # each [b, s, g/t, d]
    q, q_norm = head_norm(q, p.q_norm, c.layernorm_epsilon)
    new_k, k_norm = head_norm(k, p.k_norm, c.layernorm_epsilon)
    if context.rotary is not None:
        q, new_k = rotate(q, context.rotary), rotate(new_k, context.rotary)
    k[...] = new_k                                                       # v keeps their buffer, so k may stay in it
    site = context.dropout and context.dropout.attention(first_head=region.rank * q.shape[2])
    attended, core = core_attention_forward(CoreInputs(q, k, v, c.causal, site, context.lengths), context)
    attended = attended.reshape(*entered.shape[:2], -1)
    y = region.leave(linear(attended, p.w_out), OUTPUT)                  # g of [b, s, a/t d] @ [a/t d, h]
    if p.b_out is not None:
        add_to(y, p.b_out)                                               # the bias once, after the sum
    cache = GroupedAttentionCache(region.keep(x, entered), q_norm, k_norm, core, attended, context.rotary)
    return y, cache


def grouped_attention_backward(dy, p: GroupedAttention, cache, c, grads: GroupedAttention, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    kept, q_norm, k_norm, core, attended, rotary = cache
    # forward: y = g(attended @ w_out) + b_out
    add_bias_gradient(grads.b_out, dy)
    dy = region.leave_backward(dy, OUTPUT)                   # g, backward
    sink(grads.w_out, attended, dy)
    dattended = linear(dy, p.w_out.T).reshape(*dy.shape[:2], *p.w_q.shape[1:])
    # forward: attended = core_attention(rotate(norm(q)), rotate(norm(k)), v)
    dq, dk, dv = core_attention_backward(dattended, core)
    if rotary is not None:
        dq, dk = rotate_backward(dq, rotary), rotate_backward(dk, rotary)
    dq = head_norm_backward(dq, p.q_norm, q_norm, grads.q_norm)
    dk = head_norm_backward(dk, p.k_norm, k_norm, grads.k_norm)
    # forward: q = f(x) @ w_q + b_q; k, v = f(x) @ w_kv + b_kv
    x = region.enter_again(kept, INPUT)
    dx = projection_backward(dq, x, p.w_q, grads.w_q, grads.b_q, sink)
    add_to(dx, projection_backward(stack([dk, dv]), x, p.w_kv, grads.w_kv, grads.b_kv, sink))
    return region.enter_backward(dx, INPUT)                  # f, backward


LAYER = Layer(GroupedAttention, grouped_attention_forward, grouped_attention_backward)


# ---- what some models do without ------------------------------------------------------------------------------------


def projection(x, w, b):
    """Compute x [b, s, h] @ w [h, ..., d] + b [..., d] -> [b, s, ..., d]. The bias may be None."""
    y = linear(x, w.reshape(len(w), -1), None if b is None else b.reshape(-1))
    return y.reshape(*x.shape[:2], *w.shape[1:])


def projection_backward(dy, x, w, dw, db, sink):
    """Return dx for dy [b, s, ..., d]; add to the gradients dw and db, which may be None."""
    dy, h = dy.reshape(*x.shape[:2], -1), len(w)
    sink(dw.reshape(h, -1), x, dy)
    add_bias_gradient(db, dy)
    return linear(dy, w.reshape(h, -1).T)


def add_bias_gradient(db, dy):
    """Add the sum over all positions to the gradient of a bias, if there is one."""
    if db is not None:
        db += total(rows(dy)).reshape(db.shape)


def head_norm(x, p, epsilon):
    """Normalize each head of x [b, s, heads, d]; without a norm return x itself."""
    return (x, None) if p is None else layer_forward(x, p, epsilon)


def head_norm_backward(dy, p, cache, grads):
    """Return dx for dy [b, s, heads, d]."""
    return dy if p is None else layer_backward(dy, p, cache, grads)
