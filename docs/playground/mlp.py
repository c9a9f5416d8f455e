"""The numbers of the playground's MLP on two ranks, computed by the textbook when the site is built, for all switches.

ReLU stands in GeLU's place and biases are 0, so that whole numbers stay whole.
"""
from itertools import product
from typing import Any

import numpy as np

from reference.comm.mappings import TensorParallelRegion
from reference.config import ModelConfig
from reference.layers.mlp import (MLP, mlp_backward, mlp_forward, mlp_tensors, rows_first_mlp_forward,
                                  sharded_mlp_backward, sharded_mlp_forward)
from reference.ops import linear, relu
from reference.params import split

T, H, TOKENS = 2, 4, 4
MODEL = ModelConfig(1, H, 2, 1, TOKENS, activation="relu", ffn_hidden_size=H)
SEEDS = range(3)


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


def first_answers() -> list[dict[str, Any]]:
    """Return all numbers of each draw."""
    return [play(seed) for seed in SEEDS]


def play(seed: int) -> dict[str, Any]:
    """Draw x, A, B and dy, and compute the MLP whole, by columns with every position of f and g, and by rows."""
    draw = np.random.default_rng(seed)
    x, dy = draw.integers(-2, 3, (2, 1, TOKENS, H)).astype(float)
    p = MLP(*(draw.integers(-2, 3, shape).astype(float) if len(shape) > 1 else np.zeros(shape)
              for shape in ((H, H), (H,), (H, H), (H,))))
    y, cache = mlp_forward(x, p, MODEL)
    dx, grads = mlp_backward(dy, p, cache, MODEL)
    whole = {"x": x, "dy": dy, "A": p.w_in, "B": p.w_out, "z": linear(x, p.w_in), "y": y, "dx": dx,
             "dA": grads.w_in, "dB": grads.w_out}
    columns = {f"{f:d}{g:d}": by_columns(x, dy, p, SwitchedRegion(f, g)) for f, g in product((False, True), repeat=2)}
    return as_lists({"whole": whole, "columns": columns, "rows": by_rows(x, p)})


def by_columns(x, dy, p: MLP, region: SwitchedRegion) -> list[dict[str, Any]]:
    """Return each rank's arrays: A by columns and B by rows, as Megatron has them."""
    shards = split(p, mlp_tensors(MODEL), T)
    ys, cache = sharded_mlp_forward([x] * T, shards, MODEL, region)
    dxs, grads = sharded_mlp_backward([dy] * T, shards, cache, MODEL, region)
    return [{"A": shard.w_in, "B": shard.w_out, "z": linear(x, shard.w_in), "a": a, "before_g": before_g, "y": y,
             "dA": grad.w_in, "dB": grad.w_out, "before_f": before_f, "dx": dx}
            for shard, (_, a), before_g, y, grad, before_f, dx in zip(
                shards, cache[1], region.before_g, ys, grads, region.before_f, dxs, strict=True)]


def by_rows(x, p: MLP) -> dict[str, Any]:
    """Return the ranks' arrays with x by columns and A by rows; and y with ReLU before the sum, and after it."""
    ranks = [{"x": x_i, "A": a_i, "z": linear(x_i, a_i), "a": relu(linear(x_i, a_i))[0]}
             for x_i, a_i in zip(np.split(x, T, -1), np.split(p.w_in, T, 0), strict=True)]
    before, after = (rows_first_mlp_forward(x, p, T, "relu", reduce_first) for reduce_first in (False, True))
    return {"ranks": ranks, "a_before": sum(rank["a"] for rank in ranks), "a_after": relu(linear(x, p.w_in))[0],
            "y_before": before, "y_after": after}


def as_lists(tree):
    """Return a tree with matrices as lists of rows, of whole numbers."""
    if isinstance(tree, dict):
        return {name: as_lists(part) for name, part in tree.items()}
    if isinstance(tree, list):
        return list(map(as_lists, tree))
    assert (tree == np.round(tree)).all()
    return tree.reshape(-1, tree.shape[-1]).astype(int).tolist()
