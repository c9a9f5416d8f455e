"""The numbers of the playground's MLP on two ranks, computed by the textbook when the site is built, for all switches.

ReLU stands in GeLU's place and biases are 0, so that whole numbers stay whole.
"""
from itertools import product

import numpy as np

from reference.comm.regions import TensorParallelRegion
from reference.config import ModelConfig
from reference.layers.mlp import (MLP, mlp_backward, mlp_forward, mlp_tensors, rows_first_mlp_forward,
                                  sharded_mlp_backward, sharded_mlp_forward)
from reference.ops import linear, relu
from reference.params import split

H, RANKS, DRAWS = 4, 2, 3
MODEL = ModelConfig(1, H, 2, 1, H, activation="relu", ffn_hidden_size=H)


class SwitchedRegion(TensorParallelRegion):
    """f and g, each of which may be left out; and what the ranks brought to them."""

    def __init__(self, f: bool, g: bool):
        self.f, self.g = f, g

    def enter_backward(self, dxs):
        self.before_f = dxs
        return super().enter_backward(dxs) if self.f else dxs

    def leave(self, partial):
        self.before_g = partial
        return super().leave(partial) if self.g else partial


def first_answers() -> list[dict]:
    """Return all numbers of each draw: the MLP whole, by columns with every position of f and g, and by rows."""
    return [play(np.random.default_rng(seed).integers(-2, 3, (4, 1, H, H)).astype(float)) for seed in range(DRAWS)]


def play(drawn) -> dict:
    x, dy, ((A,), (B,)) = drawn[0], drawn[1], drawn[2:]
    p = MLP(A, np.zeros(H), B, np.zeros(H))
    y, cache = mlp_forward(x, p, MODEL)
    dx, grads = mlp_backward(dy, p, cache, MODEL)
    return {"whole": lists(x=x, dy=dy, A=A, B=B, y=y, dx=dx, dA=grads.w_in, dB=grads.w_out), "rows": by_rows(x, p),
            "columns": {f"{f}{g}": by_columns(x, dy, p, SwitchedRegion(f, g)) for f, g in product((0, 1), repeat=2)}}


def by_columns(x, dy, p: MLP, region: SwitchedRegion) -> list[dict]:
    """Return each rank's arrays: A by columns and B by rows, as Megatron has them."""
    shards = split(p, mlp_tensors(MODEL), RANKS)
    ys, cache = sharded_mlp_forward([x] * RANKS, shards, MODEL, region)
    dxs, grads = sharded_mlp_backward([dy] * RANKS, shards, cache, MODEL, region)
    return [lists(A=shard.w_in, B=shard.w_out, z=linear(x, shard.w_in), a=a, before_g=before_g, y=y, dA=grad.w_in,
                  dB=grad.w_out, before_f=before_f, dx=dx)
            for shard, (_, a), before_g, y, grad, before_f, dx in zip(
                shards, cache[1], region.before_g, ys, grads, region.before_f, dxs)]


def by_rows(x, p: MLP) -> list[dict]:
    """Return each rank's arrays: x by columns and A by rows, with ReLU before the sum, which is wrong."""
    y = rows_first_mlp_forward(x, p, RANKS, "relu", reduce_first=False)
    return [lists(x=x_i, A=a_i, z=linear(x_i, a_i), a=relu(linear(x_i, a_i))[0], y=y)
            for x_i, a_i in zip(np.split(x, RANKS, -1), np.split(p.w_in, RANKS))]


def lists(**matrices) -> dict[str, list]:
    """Return matrices as lists of rows, of whole numbers."""
    return {name: x.reshape(-1, x.shape[-1]).astype(int).tolist() for name, x in matrices.items()}
