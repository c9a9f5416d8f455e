"""The transformer's MLP: whole, and sharded over t tensor-parallel ranks (Shoeybi et al. 2019, section 3, figure 3a).

Y = GeLU(X A) B. Sharding A by columns lets every rank apply GeLU to its own columns; sharding B by rows takes those
columns as they are. One all-reduce (g) forward, one (f) backward.
"""
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from reference.activations import Activation
from reference.comm.collectives import all_reduce
from reference.layer_context import TRAINING
from reference.layers.layer import Layer
from reference.ops import ACTIVATIONS, linear, linear_backward, pre_activation, rows
from reference.params import bias, weight


@dataclass(frozen=True)
class MLP:
    """Tensors of the MLP, or their gradients. Each of t ranks has 4h/t columns of A, 4h/t rows of B, all of b_out."""

    w_in: Any    # A [h, 4h], split along axis 1
    b_in: Any    #   [4h], split along axis 0
    w_out: Any   # B [4h, h], split along axis 0
    b_out: Any   #   [h], replicated


class MLPCache(NamedTuple):
    """The arrays of one rank that the backward needs."""

    x: Any                                                                  # [b, s, h]
    act_cache: Annotated[Any, Activation("pre_activation", axis=2, array=pre_activation)]
    hidden: Annotated[Any, Activation(axis=2)]                              # [b, s, 4h/t]


def mlp_tensors(c):
    """Declare the MLP's tensors for a ModelConfig. B ends a residual branch, so its std shrinks with depth."""
    h, f, std = c.hidden_size, c.ffn_size, c.init_method_std
    return MLP(weight((h, f), std, split=1), bias((f,), split=0),
               weight((f, h), std / np.sqrt(2 * c.num_layers), split=0), bias((h,)))


def mlp_forward(x, p, c, context=TRAINING):
    """Map x [b, s, h] -> y [b, s, h]. c is the ModelConfig."""
    act, _ = ACTIVATIONS[c.activation]
    a, act_cache = act(linear(x, p.w_in, p.b_in))        # [b, s, h] @ [h, 4h] -> [b, s, 4h]
    y = linear(a, p.w_out, p.b_out)                      # [b, s, 4h] @ [4h, h] -> [b, s, h]
    return y, MLPCache(x, act_cache, a)


def mlp_backward(dy, p, cache, c):
    """Return dx [b, s, h] and the gradients, as an MLP, for dy [b, s, h]."""
    x, act_cache, a = cache
    _, act_backward = ACTIVATIONS[c.activation]
    # forward: y = a @ w_out + b_out
    da, dw_out, db_out = linear_backward(dy, a, p.w_out)
    # forward: a = act(x @ w_in + b_in)
    dx, dw_in, db_in = linear_backward(act_backward(da, act_cache), x, p.w_in)
    return dx, MLP(dw_in, db_in, dw_out, db_out)


def sharded_mlp_forward(xs, shards, c, region, context=TRAINING):
    """Map each rank's input x [b, s, h] to its output y [b, s, h]; both use the layout outside the region."""
    act, _ = ACTIVATIONS[c.activation]
    entered, partial, caches = region.enter(xs), [], []                  # f
    for x, p in zip(entered, shards):
        a, act_cache = act(linear(x, p.w_in, p.b_in))    # [b, s, h] @ [h, 4h/t] -> [b, s, 4h/t]
        partial.append(linear(a, p.w_out))               # [b, s, 4h/t] @ [4h/t, h] -> [b, s, h], a partial sum
        caches.append((act_cache, a))
    ys = [y + p.b_out for y, p in zip(region.leave(partial), shards)]    # g, and the bias once, after the sum
    return ys, (region.keep(xs, entered), caches)


def sharded_mlp_backward(dys, shards, cache, c, region):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the region."""
    kept, caches = cache
    db_outs = [rows(dy).sum(0) for dy in dys]            # forward: y = g(a @ w_out) + b_out
    partial, grads = [], []
    for dy, p, x, one, db_out in zip(region.leave_backward(dys), shards, region.enter_again(kept), caches, db_outs):
        dx, grad = mlp_backward(dy, p, (x, *one), c)
        partial.append(dx)
        grads.append(replace(grad, b_out=db_out))
    return region.enter_backward(partial), grads


LAYER = Layer("mlp", MLP, mlp_tensors, mlp_forward, mlp_backward, sharded_mlp_forward, sharded_mlp_backward,
              order="input entered w_in b_in pre_activation hidden w_out partial output b_out",
              products={"w_in": ("input", "pre_activation"), "w_out": ("hidden", "partial")})


# ---- the wrong way --------------------------------------------------------------------------------------------------


def rows_first_mlp_forward(x, p, t, activation, reduce_first):
    """Compute the MLP with A sharded by *rows*, and X by columns to match. Then X A is a sum of t partial products.

    GeLU is not linear: GeLU(X1 A1 + X2 A2) is not GeLU(X1 A1) + GeLU(X2 A2). Without `reduce_first` every rank applies
    it to its own partial product (and 1/t of the bias, so that the biases add up) and the result is simply another
    function. With it the ranks first all-reduce b s 4h elements in the middle of the layer. That is correct again, but
    the message is four times that of the split by columns, and B is still replicated: to shard it too costs a second
    one. Returns y [b, s, h].
    """
    act, _ = ACTIVATIONS[activation]
    xs, a_rows = np.split(x, t, -1), np.split(p.w_in, t, 0)
    partial = [linear(x_i, a_i) for x_i, a_i in zip(xs, a_rows)]     # [b, s, h/t] @ [h/t, 4h]
    if reduce_first:
        a = act(all_reduce(partial)[0] + p.b_in)[0]
    else:
        a = all_reduce([act(z + p.b_in / t)[0] for z in partial])[0]
    return linear(a, p.w_out, p.b_out)
