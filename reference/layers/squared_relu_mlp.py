"""The MLP with a squared ReLU: whole, and sharded over t ranks (So et al. 2021, 2109.08668: Primer; Nemotron-4's MLP).

Y = relu(X A)^2 B, without biases, sharded as the plain MLP (mlp.py). Its square is cheap to compute again, and its
slope is 2 relu(X A): so the backward needs one array of the width f, where GeLU needs two.
"""
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from reference.activations import Activation
from reference.layer_context import TRAINING
from reference.layers.layer import Layer
from reference.ops import linear, linear_backward, relu
from reference.params import weight


@dataclass(frozen=True)
class SquaredReLUMLP:
    """Tensors of the MLP, or their gradients. Each of t ranks has f/t columns of A, and f/t rows of B."""

    w_in: Any    # A [h, f], split along axis 1
    w_out: Any   # B [f, h], split along axis 0


class SquaredReLUMLPCache(NamedTuple):
    """The arrays of one rank that the backward needs."""

    x: Any                                               # [b, s, h]
    rectified: Annotated[Any, Activation(axis=2)]        # [b, s, f/t]: relu(x A)


def squared_relu_mlp_tensors(c):
    """Declare the MLP's tensors for a ModelConfig. B ends a residual branch, so its std shrinks with depth."""
    h, f, std = c.hidden_size, c.ffn_size, c.init_method_std
    return SquaredReLUMLP(weight((h, f), std, split=1), weight((f, h), std / np.sqrt(2 * c.num_layers), split=0))


def squared_relu_mlp_forward(x, p, c, context=TRAINING):
    """Map x [b, s, h] -> y [b, s, h]; on a rank's shards, its partial sum of y."""
    rectified, _ = relu(linear(x, p.w_in))                   # [b, s, h] @ [h, f] -> [b, s, f]
    return linear(rectified * rectified, p.w_out), SquaredReLUMLPCache(x, rectified)     # @ [f, h] -> [b, s, h]


def squared_relu_mlp_backward(dy, p, cache, c):
    """Return dx [b, s, h] and the gradients, as a SquaredReLUMLP, for dy [b, s, h]."""
    x, rectified = cache
    # forward: y = rectified^2 @ w_out
    dhidden, dw_out, _ = linear_backward(dy, rectified * rectified, p.w_out)
    # forward: rectified = relu(x @ w_in)
    dx, dw_in, _ = linear_backward(2 * dhidden * rectified, x, p.w_in)
    return dx, SquaredReLUMLP(dw_in, dw_out)


def sharded_squared_relu_mlp_forward(xs, shards, c, region, context=TRAINING):
    """Map each rank's input x [b, s, h] to its output y [b, s, h]; both use the layout outside the region."""
    entered = region.enter(xs)                                                                         # f
    partial, caches = zip(*[squared_relu_mlp_forward(x, p, c) for x, p in zip(entered, shards)])
    return region.leave(list(partial)), (region.keep(xs, entered), [cache.rectified for cache in caches])    # g


def sharded_squared_relu_mlp_backward(dys, shards, cache, c, region):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the region."""
    kept, caches = cache
    partial, grads = zip(*[squared_relu_mlp_backward(dy, p, (x, rectified), c) for dy, p, x, rectified in zip(
        region.leave_backward(dys), shards, region.enter_again(kept), caches)])
    return region.enter_backward(list(partial)), list(grads)


LAYER = Layer("mlp", SquaredReLUMLP, squared_relu_mlp_tensors, squared_relu_mlp_forward, squared_relu_mlp_backward,
              sharded_squared_relu_mlp_forward, sharded_squared_relu_mlp_backward, chosen=lambda c: c.squared_relu,
              order="input entered w_in pre_activation rectified hidden w_out partial output",
              products={"w_in": ("input", "pre_activation"), "w_out": ("hidden", "partial")})
