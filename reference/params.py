"""Trees of tensors: what is declared about each one, how it starts, and how it is split.

A layer's tensors are one dataclass (`MLP`, `Attention`, ...), whatever stands at its leaves: declarations (`Tensor`),
parameters, gradients, or an optimizer's moments. A model is a tree of those. Names are paths in the tree, as in
`blocks.3.mlp.w_in`, and do not depend on who holds the tensor.
"""
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from reference import counter_rng
from reference.config import round_up
from reference.errors import UserError

HOST = np.empty(0)  # a prototype: arrays made "like" this one are NumPy's


@dataclass(frozen=True)
class Tensor:
    """What everyone who holds a tensor, or a part of it, agrees on."""

    shape: tuple[int, ...]     # of the whole tensor, without padding
    split: int | None = None   # the axis that tensor parallelism cuts; None: every rank holds all of it
    std: float = 0.0           # it starts as N(0, std) ...
    fill: float = 0.0          # ... around this value
    decay: bool = False        # whether weight decay applies to it
    pad_to: int = 0            # the split axis is padded to a multiple of this x t; 0: it must divide by t

    def padded(self, t: int) -> int:
        """Length of the split axis, which there must be, once it is padded for t ranks. Raises UserError."""
        assert self.split is not None
        length = self.shape[self.split]
        if self.pad_to:
            return round_up(length, self.pad_to * t)
        if length % t:
            raise UserError(f"A tensor of shape {self.shape} cannot be cut into {t} along axis {self.split}: {length} "
                            f"does not divide by {t}. Choose another number of tensor-parallel ranks.")
        return length

    def local_shape(self, t: int) -> tuple[int, ...]:
        """Shape of the shard that each of t ranks holds, padding included."""
        if self.split is None:
            return self.shape
        return (*self.shape[:self.split], self.padded(t) // t, *self.shape[self.split + 1:])


def weight(shape: tuple[int, ...], std: float, split: int | None = None, pad_to: int = 0) -> Tensor:
    """A matrix (or an embedding): drawn from N(0, std), subject to weight decay."""
    return Tensor(shape, split, std, decay=True, pad_to=pad_to)


def bias(shape: tuple[int, ...], split: int | None = None) -> Tensor:
    """Starts at 0; no weight decay."""
    return Tensor(shape, split)


def gain(shape: tuple[int, ...]) -> Tensor:
    """The weight of a layer norm: starts at 1; no weight decay."""
    return Tensor(shape, fill=1.0)


# ---- trees ----------------------------------------------------------------------------------------------------


def children(tree) -> list[tuple[Any, Any]] | None:
    """(key, subtree) pairs of a dataclass or a dict; None for a leaf. A `Tensor` is a leaf."""
    if isinstance(tree, dict):
        return list(tree.items())
    if is_dataclass(tree) and not isinstance(tree, Tensor):
        return [(f.name, getattr(tree, f.name)) for f in fields(tree)]
    return None


def leaves(tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, leaf) pairs in declaration order. What a stage does not hold is None and has no leaves."""
    below = children(tree)
    if below is None:
        if tree is not None:
            yield prefix, tree
        return
    for key, subtree in below:
        yield from leaves(subtree, f"{prefix}.{key}" if prefix else str(key))


def tree_map(function, tree, *others):
    """A tree of the same form, with function(leaf, *leaves of the others) in place of each leaf."""
    below = children(tree)
    if below is None:
        return None if tree is None else function(tree, *others)
    if isinstance(tree, dict):
        return {key: tree_map(function, subtree, *(other[key] for other in others)) for key, subtree in below}
    return replace(tree, **{key: tree_map(function, subtree, *(getattr(other, key) for other in others))
                            for key, subtree in below})


def assign(view, values) -> None:
    """Give the elements of one array those of another: for tree_map over views of a buffer."""
    view[...] = values


def with_names(tree, prefix: str = ""):
    """A tree of (name, leaf) pairs, for a tree_map that needs the names, which begin with that of the tree."""
    named = leaves(tree, prefix)
    return tree_map(lambda leaf: Named(*next(named)), tree)


class Named(NamedTuple):
    name: str
    leaf: Any


# ---- initial values -------------------------------------------------------------------------------------------


def initialize(tensors, seed: int, dtype):
    """Initial parameters, whole: each element a function of (seed, tensor name, index in the whole tensor)."""
    return tree_map(lambda named: draw(named, named.leaf.shape, 0, seed, HOST).astype(dtype), with_names(tensors))


def initialize_shard(tensors, seed: int, dtype, t: int, rank: int, like=HOST, prefix: str = ""):
    """Rank `rank`'s shard of the same initial parameters: what `split` would give it, drawn without the rest.

    `like` is an array of the library that the parameters shall belong to; `prefix` is the name of a part of a model.
    """
    return tree_map(lambda named: draw(named, named.leaf.local_shape(t), rank, seed, like).astype(dtype),
                    with_names(tensors, prefix))


def draw(named: Named, shape, rank: int, seed: int, like):
    """float64 [shape]: a tensor's part that begins at rank x shape along its split axis. Draws are 0 in padding."""
    name, tensor = named
    if tensor.std == 0:
        return np.full_like(like, tensor.fill, shape=shape, dtype=np.float64)
    first = [rank * length if axis == tensor.split else 0 for axis, length in enumerate(shape)]
    index = counter_rng.indices(shape, tensor.shape, first, like)
    x = tensor.fill + tensor.std * counter_rng.normal(counter_rng.key(seed, "weights", name), index)
    if tensor.split is None:
        return x
    inside = counter_rng.coordinates(shape, tensor.split, first[tensor.split], like) < tensor.shape[tensor.split]
    return np.where(inside, x, 0.0)


# ---- split and joined -----------------------------------------------------------------------------------------


def split(params, tensors, t: int) -> list:
    """The shards of t ranks: whole parameters (or gradients) padded, then cut along each tensor's split axis."""
    return [tree_map(lambda x, tensor, rank=rank: shard(x, tensor, t, rank), params, tensors) for rank in range(t)]


def shard(x, tensor: Tensor, t: int, rank: int):
    """Rank `rank`'s part of the whole tensor x; all of x where the tensor is replicated."""
    if tensor.split is None:
        return x
    padding = [(0, 0)] * x.ndim
    padding[tensor.split] = (0, tensor.padded(t) - x.shape[tensor.split])
    return np.split(np.pad(x, padding), t, tensor.split)[rank]


def join(shards: list, tensors):
    """The whole parameters (or gradients) from those of t ranks: the inverse of `split`. Padding is dropped."""
    return tree_map(lambda tensor, *parts: whole(parts, tensor), tensors, *shards)


def whole(parts, tensor: Tensor):
    """The whole tensor from the shards of all ranks, in rank order; the first of them where it is replicated."""
    if tensor.split is None:
        return parts[0]
    length = tensor.shape[tensor.split]
    return np.concatenate(parts, tensor.split)[(slice(None),) * tensor.split + (slice(length),)]
