"""Self-attention on one tensor-parallel rank, a/t of the heads. Its textbook twin is reference/layers/attention.py."""
import numpy as np

from mpi_impl.comm.reason import Reason
from mpi_impl.kernels import add_to, linear, rotate, rotate_backward, rows, stack, total
from mpi_impl.layers.core_attention import core_attention_backward, core_attention_forward
from mpi_impl.layers.layer import Layer
from reference.layer_context import TRAINING
from reference.layers.attention import Attention, AttentionCache
from reference.ops import CoreInputs

INPUT, OUTPUT = Reason("attention", "input"), Reason("attention", "output")


def attention_forward(x, p: Attention, c, region, context=TRAINING):
    """Map x [b, s, h] to y [b, s, h], both outside the region. c is the ModelConfig."""
    dropout, rotary = context.dropout, context.rotary
    entered = region.enter(x, INPUT)                         # f
    b, s, h = entered.shape
    qkv = linear(entered, p.w_qkv.reshape(h, -1), p.b_qkv.reshape(-1))         # [b, s, h] @ [h, 3 h/t] -> [b, s, 3 h/t]
    q, k, v = (part[:, :, 0] for part in np.split(qkv.reshape(b, s, *p.b_qkv.shape), 3, 2))   # each [b, s, a/t, d]
    if rotary is not None:
        q[...], k[...] = rotate(q, rotary), rotate(k, rotary)            # v keeps their buffer, so they may stay in it
    site = dropout and dropout.attention(first_head=region.rank * q.shape[2])
    inputs = CoreInputs(q, k, v, c.causal, site, context.lengths)
    attended, core = core_attention_forward(inputs, context)             # [b, s, a/t, d]
    attended = attended.reshape(b, s, -1)
    y = region.leave(linear(attended, p.w_out), OUTPUT)                  # g of [b, s, h/t] @ [h/t, h]
    cache = AttentionCache(region.keep(x, entered), core, attended, rotary)
    add_to(y, p.b_out)                                                   # the bias once, after the sum
    return y, cache


def attention_backward(dy, p: Attention, cache, c, grads: Attention, sink, region):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    kept, core, context, rotary = cache
    (b, s, _), h = context.shape, len(p.w_qkv)
    # forward: y = g(context @ w_out) + b_out
    grads.b_out[...] += total(rows(dy))
    dy = region.leave_backward(dy, OUTPUT)                   # g, backward
    sink(grads.w_out, context, dy)
    dcontext = linear(dy, p.w_out.T).reshape(b, s, *p.b_qkv.shape[1:])
    # forward: context = core_attention(rotate(q), rotate(k), v)
    dq, dk, dv = core_attention_backward(dcontext, core)
    if rotary is not None:
        dq, dk = rotate_backward(dq, rotary), rotate_backward(dk, rotary)
    # forward: q, k, v = f(x) @ w_qkv + b_qkv
    dqkv = stack([dq, dk, dv]).reshape(b, s, -1)                         # [b, s, 3 h/t]
    sink(grads.w_qkv.reshape(h, -1), region.enter_again(kept, INPUT), dqkv)
    grads.b_qkv[...] += total(rows(dqkv)).reshape(grads.b_qkv.shape)
    dx = linear(dqkv, p.w_qkv.reshape(h, -1).T)
    return region.enter_backward(dx, INPUT)                  # f, backward


LAYER = Layer(Attention, attention_forward, attention_backward)
