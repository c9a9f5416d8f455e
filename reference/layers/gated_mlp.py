"""The MLP with a gate: whole, and sharded over t tensor-parallel ranks (Shazeer 2020: SwiGLU; the MLP of Llama).

Y = (silu(X G) * X U) B. G and U are one matrix [h, 2, f], sharded along f: a rank has the columns j of both, which are
multiplied with each other, and row j of B. So the whole MLP is one region, as the plain one (mlp.py).
"""
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np

from reference.activations import Activation
from reference.comm.collectives import all_reduce
from reference.layer_context import TRAINING
from reference.layers.layer import Layer
from reference.ops import linear, linear_backward, pre_activation, swiglu, swiglu_backward
from reference.params import weight


@dataclass(frozen=True)
class GatedMLP:
    """Tensors of the MLP, or their gradients. Each of t ranks has f/t columns of G and of U, and f/t rows of B."""

    w_in: Any    # G and U [h, 2, f], split along axis 2
    w_out: Any   # B [f, h], split along axis 0


class GatedMLPCache(NamedTuple):
    """The arrays of one rank that the backward needs."""

    x: Any                                                                  # [b, s, h]
    act_cache: Annotated[Any, Activation("gate_up", axis=3, array=pre_activation)]
    hidden: Annotated[Any, Activation(axis=2)]                              # [b, s, f/t]


def gated_mlp_tensors(c):
    """Declare the MLP's tensors for a ModelConfig. B ends a residual branch, so its std shrinks with depth."""
    h, f, std = c.hidden_size, c.ffn_size, c.init_method_std
    return GatedMLP(weight((h, 2, f), std, split=2), weight((f, h), std / np.sqrt(2 * c.num_layers), split=0))


def gated_mlp_forward(x, p, c, context=TRAINING):
    """Map x [b, s, h] -> y [b, s, h]; on a rank's shards, its partial sum of y."""
    h, *columns = p.w_in.shape
    z = linear(x, p.w_in.reshape(h, -1)).reshape(*x.shape[:-1], *columns)     # [b, s, h] @ [h, 2 f] -> [b, s, 2, f]
    a, act_cache = swiglu(z)                                                  # [b, s, f]
    return linear(a, p.w_out), GatedMLPCache(x, act_cache, a)                 # [b, s, f] @ [f, h] -> [b, s, h]


def gated_mlp_backward(dy, p, cache, c):
    """Return dx [b, s, h] and the gradients, as a GatedMLP, for dy [b, s, h]."""
    x, act_cache, a = cache
    # forward: y = a @ w_out
    da, dw_out, _ = linear_backward(dy, a, p.w_out)
    # forward: a = swiglu(x @ w_in)
    dz = swiglu_backward(da, act_cache)
    dx, dw_in, _ = linear_backward(dz.reshape(*x.shape[:-1], -1), x, p.w_in.reshape(x.shape[-1], -1))
    return dx, GatedMLP(dw_in.reshape(p.w_in.shape), dw_out)


def sharded_gated_mlp_forward(xs, shards, c, region, context=TRAINING):
    """Map each rank's input x [b, s, h] to its output y [b, s, h]; both use the layout outside the region."""
    entered = region.enter(xs)                                                              # f
    partial, caches = zip(*[gated_mlp_forward(x, p, c) for x, p in zip(entered, shards)])
    return region.leave(list(partial)), (region.keep(xs, entered), [cache[1:] for cache in caches])    # g


def sharded_gated_mlp_backward(dys, shards, cache, c, region):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the region."""
    kept, caches = cache
    partial, grads = zip(*[gated_mlp_backward(dy, p, (x, *one), c) for dy, p, x, one in zip(
        region.leave_backward(dys), shards, region.enter_again(kept), caches)])
    return region.enter_backward(list(partial)), list(grads)


LAYER = Layer("mlp", GatedMLP, gated_mlp_tensors, gated_mlp_forward, gated_mlp_backward, sharded_gated_mlp_forward,
              sharded_gated_mlp_backward, chosen=lambda c: c.swiglu,
              order="input entered w_in gate_up hidden w_out partial output",
              products={"w_in": ("input", "gate_up"), "w_out": ("hidden", "partial")})


# ---- the wrong way --------------------------------------------------------------------------------------------------


def side_by_side_mlp_forward(x, p, c, t):
    """Compute the MLP with G and U as one matrix [h, 2f] that is sharded like any other: into t blocks of its columns.

    The first ranks then have columns of the gate alone, the last ones of U alone; and each multiplies two halves of
    what it has with each other, which do not belong together. All shapes are right, so nothing complains, and the model
    even learns; but it is another function on every number of ranks, and its checkpoints fit no other. Returns
    y [b, s, h].
    """
    side_by_side = p.w_in.reshape(len(p.w_in), -1)                            # [h, 2f]: G, then U
    shards = [columns.reshape(len(columns), 2, -1) for columns in np.split(side_by_side, t, -1)]
    return all_reduce([gated_mlp_forward(x, GatedMLP(w_in, w_out), c)[0]
                       for w_in, w_out in zip(shards, np.split(p.w_out, t, 0))])[0]
