"""Checkpoints of other frameworks with the weights of transformers' Llama: each by its name, as [out, in].

Megatron-core has q, k and v in one tensor, group by group, gate and up in one, a vocabulary with padding, and all
layers of a DCP in one tensor. GPT-2 has q, k and v one after the other. torchtitan's rope is interleaved: it turns rows
2i and 2i + 1 of a head, where the others turn rows i and i + d/2.
"""
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.runtime.formats import Object, read_json
from reference.errors import UserError
from shardlab.compare.recording import TensorPart, whole_shape
from shardlab.compare.their_runs.differences import whole_of
from shardlab.compare.their_runs.frameworks import FRAMEWORKS, FUSED, common_name
from shardlab.compare.their_runs.records import TheirKey, TheirRun

LAYERS = re.compile(r"decoder[.]layers[.](?!\d)")
IN_LAYER = re.compile(rf"(?:decoder[.]layers|layers|transformer[.]h)[.](\d+)[.]({'|'.join(FUSED)})[.](weight|bias)")
# Transformer Engine's names of the norm before a linear layer.
NORMS = (("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
         ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."))


VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
ROTATED = tuple(f"self_attn.{name}_proj.{end}" for end in ("weight", "bias") for name in "qk")
CLOSE = 1e-2        # of the largest element: bfloat16's rounding is less
MOST_LAYERS = 1 << 12


class Weight(NamedTuple):
    """A weight, or one of several that a tensor has."""

    run: TheirRun
    stored: TheirKey
    layer: int | None = None    # its place in a tensor of all layers
    turned: bool = False        # whether it is stored as [in, out]
    order: str = ""             # of its rows
    number: int = 0
    pieces: int = 1
    queries: int = 0            # rows of q, before k and v

    def shape(self) -> tuple[int, ...]:
        return self.cut(np.broadcast_to(0, whole_shape(part for part, _ in self.run.parts[self.stored])), "", 1).shape

    def value(self, order: str, d: int) -> Any:
        """Read the weight, whose rows have this order, in heads of d."""
        return self.cut(whole_of(self.run.folder, self.run, self.stored), order, d)

    def cut(self, stored: Any, order: str, d: int) -> Any:
        """Return the weight that a stored tensor has. Raises UserError for one of a wrong shape."""
        x = stored if self.layer is None else stored[self.layer]
        x = x.T if self.turned else x
        try:
            if order == "interleaved":
                return interleaved(x, d)
            if order == "by group":
                groups = (len(x) - self.queries) // 2 // d
                x = np.split(x.reshape(groups, -1, d, *x.shape[1:]), [-2, -1], 1)[self.number]
                return x.reshape(-1, *x.shape[3:])
            ends = [self.queries, (len(x) + self.queries) // 2] if self.pieces == 3 else self.pieces
            return x if self.pieces == 1 else np.split(x, ends)[self.number]
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise UserError(f"{self.run.folder} has {self.stored} as {list(stored.shape)}, which its framework cannot "
                            f"have: {error}.") from error


def weights_of(run: TheirRun, framework: str) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of a checkpoint, with their names in transformers' Llama."""
    anchor = f"{next(iter(FRAMEWORKS[framework]))}.weight"
    prefix = min((key.name for key in run.order if key.name.endswith(anchor)), key=len).removesuffix(anchor)
    shapes = {key.name.removeprefix(prefix): whole_shape([part for part, _ in run.parts[key]]) or (1,)
              for key in run.order}
    for key in run.order:
        stored = name = key.name.removeprefix(prefix)
        for old, new in NORMS:
            name = name.replace(old, new)
        stacked = LAYERS.match(name) and len(shapes[stored]) > 1 and shapes[stored][0] <= MOST_LAYERS
        for layer in range(shapes[stored][0]) if stacked else [None]:
            full = LAYERS.sub(f"decoder.layers.{layer}.", name) if stacked else name
            weight = Weight(run, key, layer)
            if not (found := IN_LAYER.fullmatch(full)):
                yield common_name(full, framework), weight
                continue
            number, own, end = found.groups()
            order, names = FUSED[own]
            c_attn = shapes.get(f"transformer.h.{number}.attn.c_attn.weight", (1, 0))
            rows = shapes[stored][bool(stacked)]
            after = re.sub(r"linear_qkv[.].*", "linear_proj.weight", re.sub(r"fc1[.].*", "fc2.weight", stored))
            columns = shapes.get(after, (0,))[-1] if after != stored else max(shapes[stored]) // 3
            wholes = names.split()[own == "mlp.linear_fc1" and columns == rows:]
            for i, one in enumerate(wholes):
                yield f"model.layers.{number}.{one}.{end}", weight._replace(
                    turned=".c_" in own and c_attn[0] < c_attn[-1], order=order, number=i, pieces=len(wholes),
                    queries=columns)


def framework_of(run: TheirRun) -> str | None:
    """Return the framework whose table of words a checkpoint has, whatever is before its name."""
    return next((framework for framework, table in FRAMEWORKS.items() for key in run.parts
                 if f".{key.name}".endswith(f".{next(iter(table))}.weight")), None)


class Translated(TheirRun):
    """A checkpoint of some framework with the weights of transformers' Llama, of heads of `d` rows."""

    has_ranks = False

    def __init__(self, run: TheirRun, framework: str):
        super().__init__(run.folder, [], {}, {})
        self.framework, self.weights, self.d = framework, dict(weights_of(run, framework)), 1
        for name, weight in self.weights.items():
            self.order.append(key := weight.stored._replace(name=name))
            self.formats[key] = run.formats[weight.stored]
            self.place(key, weight.shape())

    def place(self, key: TheirKey, shape: tuple[int, ...]) -> None:
        """Let a weight have this shape, without padding."""
        self.parts[key] = [(TensorPart(0, (0,) * len(shape), shape, False),
                            lambda: self.value(key)[tuple(map(slice, shape))])]

    def value(self, key: TheirKey, order: str | None = None, d: int = 0) -> Any:
        """Read a weight, with its rows in their order or in another."""
        weight = self.weights[key.name]
        return weight.value(weight.order if order is None else order, d or self.d)

    def stored(self, key: TheirKey) -> str:
        """Return a weight's name, with the one that it has in the framework."""
        name = self.weights[key.name].stored.name
        return name if name == key.name else f"{key.name} ({name})"


class Pair:
    """Two checkpoints with the weights of one framework, and what explains their differences."""

    def __init__(self, a: TheirRun, b: TheirRun, frameworks: tuple[str, str]):
        self.a, self.b = Translated(a, frameworks[0]), Translated(b, frameworks[1])
        self.common = [key for key in self.a.order if key in self.b.parts]
        for key in self.common:     # a vocabulary's padding is not compared
            for run, other in ((self.a, self.b), (self.b, self.a)):
                own, shape = run.weights[key.name].shape(), other.weights[key.name].shape()
                if run.framework == "Megatron-core" and key.name in VOCABULARY and own[1:] == shape[1:] and own > shape:
                    run.place(key, shape)

    def find_heads(self) -> None:
        """Find the rows of a head: in a config.json, or the number by which most of the first layer's weights agree."""
        keys = [key for key in self.common if key.name.endswith((*ROTATED, "self_attn.v_proj.weight"))][:3]
        rows = min((self.a.weights[key.name].shape()[0] for key in keys), default=0)
        orders = {run.weights[key.name].order for run in (self.a, self.b) for key in keys}
        known = head_size(self.a.folder) or head_size(self.b.folder)
        self.sizes = [known] if known else [d for d in range(4, rows + 1, 2) if rows % d == 0]
        if any(orders):
            self.a.d = self.b.d = max(self.sizes or [rows], key=lambda d: sum(
                same(self.a.value(key, d=d), self.b.value(key, d=d)) for key in keys))

    def __str__(self) -> str:
        heads = f", with heads of {self.a.d} rows" if self.a.d > 1 else ""
        interleaved = "; torchtitan's q and k have theirs in the order of interleaved rope, which is right"
        frameworks = self.a.framework, self.b.framework
        return f"A is of {frameworks[0]} and B of {frameworks[1]}{heads}{interleaved * ('torchtitan' in frameworks)}."

    def explanation(self) -> str:
        """Explain the first weight that differs by its layout alone; an empty text if there is none."""
        with suppress(UserError):       # a model that is not known here may have other shapes
            self.find_heads()
            for key in self.common:
                x, y = self.a.value(key), self.b.value(key)
                if not same(x, y) and (what := self.what(key, x, y)):
                    return f"B's {self.b.stored(key)} is {what}. One of the two is wrong."
        return ""

    def what(self, key: TheirKey, x: Any, y: Any) -> str:
        """Describe B's weight y by A's, of which x has the name."""
        its, both = f"A's {self.a.stored(key)}", (self.a, self.b)
        orders = [run.weights[key.name].order for run in both]
        if same(x.T, y):
            return f"{its}, transposed"
        if "by group" in orders and same(*(run.value(key, "") for run in both)):
            return f"{its} with q, k and v one after the other, but Megatron-core has them group by group"
        if key.name.endswith(ROTATED):
            if orders[0] != orders[1] and same(*(run.value(key, order.replace("interleaved", ""))
                                               for run, order in zip(both, orders))):
                return f"{its} with its rows in the same order, but only torchtitan's rope is interleaved"
            for d in self.sizes:
                if same(interleaved(y, d), x):
                    return (f"{its} with its rows in the order of interleaved rope, which {self.b.framework} does not "
                            "use")
                if same(interleaved(x, d), y):
                    return f"{its}, whose rows are in the order of interleaved rope, in that of {self.b.framework}"
        others = (other for other in self.common if other.layer == key.layer is not None and y.ndim == 2)
        return next((f"A's {self.a.stored(other)}, but should be {its}" for other in others
                     if same(self.a.value(other), y)), "")


def head_size(checkpoint: str) -> int | None:
    """Return the rows of a head by the config.json next to a checkpoint's files, if there is one."""
    path = os.path.join(checkpoint if os.path.isdir(checkpoint) else os.path.dirname(checkpoint), "config.json")
    config = defaultdict(int, read_json(path, Object) if os.path.exists(path) else {})
    with suppress(TypeError, ZeroDivisionError):
        heads = config["num_attention_heads"] or config["n_head"]
        return int(config["head_dim"] or (config["hidden_size"] or config["n_embd"]) // heads) or None
    return None


def interleaved(x: Any, d: int) -> Any:
    """Bring rows that interleaved rope turns into the order of the other one, in heads of d."""
    return x.reshape(-1, d // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def in_one_layout(a: TheirRun, b: TheirRun) -> Pair | None:
    """Return two checkpoints with the weights of one framework, if both are of known ones."""
    one, other = framework_of(a), framework_of(b)
    with suppress(UserError):
        return Pair(a, b, (one, other)) if one and other else None
    return None


def same(x: Any, y: Any) -> bool:
    return x.shape == y.shape and abs(x - y).max(initial=0) <= CLOSE * abs(x).max(initial=0)
