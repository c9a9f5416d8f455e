"""Self-attention on one tensor-parallel rank, a/t of the heads. Its textbook twin is reference/layers/attention.py."""
import numpy as np

from mpi_impl.kernels import attention_core, attention_core_backward, linear, rotate, rotate_backward, rows
from reference.layers.attention import Attention, AttentionCache


def attention_forward(x, p: Attention, causal, rotary, region):
    """x [b, s, h], alike on all ranks -> y [b, s, h], alike on all ranks."""
    b, s, h = x.shape
    x = region.enter(x, "attention input")                   # f: identity forward
    qkv = linear(x, p.w_qkv.reshape(h, -1), p.b_qkv.reshape(-1))         # [b, s, h] @ [h, 3 h/t] -> [b, s, 3 h/t]
    q, k, v = (part[:, :, 0] for part in np.split(qkv.reshape(b, s, *p.b_qkv.shape), 3, 2))   # each [b, s, a/t, d]
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    context, core = attention_core(q, k, v, causal)                      # [b, s, a/t, d]
    context = context.reshape(b, s, -1)
    y = region.leave(linear(context, p.w_out), "attention output")       # g: all-reduce of [b, s, h/t] @ [h/t, h]
    return y + p.b_out, AttentionCache(x, core, context, rotary)         # the bias once, after the sum


def attention_backward(dy, p: Attention, cache, grads: Attention, sink, region):
    """dy [b, s, h], alike on all ranks -> dx [b, s, h], alike on all ranks."""
    x, core, context, rotary = cache
    b, s, h = x.shape
    # forward: y = g(context @ w_out) + b_out
    grads.b_out[...] += rows(dy).sum(0)
    dy = region.leave_backward(dy, "attention output")       # g: identity backward
    sink(grads.w_out, context, dy)
    dcontext = linear(dy, p.w_out.T).reshape(b, s, *p.b_qkv.shape[1:])
    # forward: context = attention_core(rotate(q), rotate(k), v)
    dq, dk, dv = attention_core_backward(dcontext, core)
    if rotary is not None:
        dq, dk = rotate_backward(dq, rotary), rotate_backward(dk, rotary)
    # forward: q, k, v = f(x) @ w_qkv + b_qkv
    dqkv = np.stack([dq, dk, dv], 2).reshape(b, s, -1)                   # [b, s, 3 h/t]
    sink(grads.w_qkv.reshape(h, -1), x, dqkv)
    grads.b_qkv[...] += rows(dqkv).sum(0).reshape(grads.b_qkv.shape)
    dx = linear(dqkv, p.w_qkv.reshape(h, -1).T)
    return region.enter_backward(dx, "attention input")      # f: all-reduce backward
