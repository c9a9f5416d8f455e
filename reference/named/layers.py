"""The layers of a transformer, written once, on whole arrays with named axes. Nothing here knows of ranks.

b samples, s positions (z: those of keys), h features, f features inside the MLP, g heads of keys and values, each for r
heads of queries, of d features, V tokens. `p` is the Program, `w` maps names to weights, of which biases may be absent.
"""
from math import sqrt

import numpy as np

from reference import ops
from reference.named.functions import Function
from reference.named.program import Named, Program

GELU, SWIGLU = Function(*ops.ACTIVATIONS["gelu"]), Function(ops.swiglu, ops.swiglu_backward)
NORMALIZE = Function(lambda x: ops.layer_norm(x, 1, 0, 1e-5), lambda dy, kept: ops.layer_norm_backward(dy, 1, kept)[0])
SOFTMAX = Function(lambda scores, past: (ops.softmax(np.where(past > 0, scores, -np.inf)),) * 2, ops.softmax_backward)
EXP = Function(lambda x: (np.exp(x),) * 2, lambda dy, y: dy * y)
LOG = Function(lambda x: (np.log(x), x), lambda dy, x: dy / x)
SAME = Function(lambda x: (x, None), lambda dy, _: dy)
KEYS, VALUES = (Function(lambda x, i=i: (x[:, :, i], None), lambda dy, _, i=i: np.stack(
    [dy if i == j else np.zeros_like(dy) for j in range(2)], 2)) for i in range(2))


def linear(p: Program, x: Named, w: Named, b: Named | None, out: str) -> Named:
    y = p.product(x, w, out)
    return y if b is None else p.sum(y, b)


def mlp(p: Program, x: Named, w) -> Named:
    """Map x [b s h] to y [b s h]."""
    a = p.function(GELU, linear(p, x, w["w_in"], w.get("b_in"), "b s f"))
    return linear(p, a, w["w_out"], w.get("b_out"), "b s h")


def gated_mlp(p: Program, x: Named, w) -> Named:
    """Map x [b s h] to y [b s h]. On an axis n, w_in [h n f] has the gate, then what it multiplies."""
    a = p.function(SWIGLU, p.product(x, w["w_in"], "b s n f"), along="n", out="b s f")
    return p.product(a, w["w_out"], "b s h")


def attention(p: Program, x: Named, w, past: Named) -> Named:
    """Map x [b s h] to y [b s h]. `past` [s z] is 1 where position s may attend to z, else 0."""
    q = linear(p, x, w["w_q"], w.get("b_q"), "b s g r d")
    kv = linear(p, x, w["w_kv"], w.get("b_kv"), "b s n g d")
    k, v = (p.function(SAME, p.function(one, kv, along="n", out="b s g d"), along="s", out="b z g d")
            for one in (KEYS, VALUES))
    root = sqrt(p.sizes["d"])
    scaled = p.function(Function(lambda x: (x / root, None), lambda dy, _: dy / root), p.product(q, k, "b g r s z"))
    mixed = p.product(p.function(SOFTMAX, scaled, past, along="z"), v, "b s g r d")
    return linear(p, mixed, w["w_out"], w.get("b_out"), "b s h")


def layer_norm(p: Program, x: Named, w) -> Named:
    """Normalize the features of x [b s h]."""
    return p.sum(p.product(p.function(NORMALIZE, x, along="h"), w["weight"], "b s h"), w["bias"])


def block(p: Program, x: Named, w, past: Named) -> Named:
    """Map x [b s h] to y [b s h]: attention, then the MLP, each behind a norm and beside a residual."""
    x = p.sum(x, attention(p, layer_norm(p, x, w["input_layernorm"]), w["attention"], past))
    return p.sum(x, mlp(p, layer_norm(p, x, w["post_attention_layernorm"]), w["mlp"]))


def embedding(p: Program, tokens: Named, w) -> Named:
    """Map tokens [b s V], one 1 among zeros for each, to x [b s h]."""
    return p.sum(p.product(tokens, w["word"], "b s h"), w["position"])


def loss(p: Program, x: Named, word: Named, targets: Named, ones: Named) -> Named:
    """Map x [b s h] and targets, as tokens above, to the loss [b s]; ones [V] are to be summed over."""
    logits = p.product(x, word, "b s V")
    shifted = p.sum(logits, p.largest(logits, "V"), -1)
    total = p.product(p.function(EXP, shifted), ones, "b s")
    return p.sum(p.function(LOG, total), p.product(shifted, targets, "b s"), -1)
