"""Trees of tensors: their declarations, initial values and shards.

A layer's tensors are one dataclass (`MLP`, `Attention`, ...) for every kind of leaf: declarations (`Tensor`),
parameters, gradients, or an optimizer's moments. A model is a tree of those. Names are paths in the tree, as in
`blocks.3.mlp.w_in`, and do not depend on the rank that holds the tensor.
"""
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from reference.config import round_up
from reference.errors import UserError
from reference.random import counter_rng

HOST = np.empty(0)  # a prototype: arrays made "like" this one are NumPy's


@dataclass(frozen=True)
class Tensor:
    """The declaration of a tensor, on which all ranks that hold it, or a shard of it, agree."""

    shape: tuple[int, ...]     # of the whole tensor, without padding
    split: int | None = None   # the axis that tensor parallelism shards; None: replicated
    std: float = 0.0           # it starts as N(0, std) ...
    fill: float = 0.0          # ... around this value
    decay: bool = False        # whether weight decay applies to it
    pad_to: int = 0            # the split axis is padded to a multiple of this x t; 0: it must divide by t
    dealt: bool = False        # whether axis 0 numbers experts, which expert parallelism deals out
    most_shards: int | None = None   # on more ranks some hold copies, and the gradient of each is a partial sum

    def copies(self, t: int) -> int:
        """Return how many neighbours of t ranks hold the same elements."""
        if self.split is None:
            return t
        return 1 if self.most_shards is None else max(1, t // self.most_shards)

    def padded(self, t: int) -> int:
        """Return the length of the split axis after padding for t shards. Raise UserError if t does not divide it."""
        assert self.split is not None
        length = self.shape[self.split]
        if self.pad_to:
            return round_up(length, self.pad_to * t)
        if length % t:
            raise UserError(f"A tensor of shape {self.shape} cannot be sharded {t} ways along axis {self.split}: "
                            f"{length} does not divide by {t}. Choose another number of tensor-parallel ranks.")
        return length

    def local_shape(self, t: int, e: int = 1) -> tuple[int, ...]:
        """Return the shape of the shard that each of t ranks holds, padding included, where e ranks share experts."""
        shape = (self.shape[0] // e, *self.shape[1:]) if self.dealt else self.shape
        if self.split is None:
            return shape
        shards = t // self.copies(t)
        return (*shape[:self.split], self.padded(shards) // shards, *shape[self.split + 1:])

    def stacked(self, n: int) -> "Tensor":
        """Return the declaration of this tensor of n experts, along a new first axis."""
        return replace(self, shape=(n, *self.shape), split=None if self.split is None else self.split + 1, dealt=True)


def weight(shape: tuple[int, ...], std: float, split: int | None = None, pad_to: int = 0) -> Tensor:
    """Declare a matrix (or an embedding), drawn from N(0, std) and subject to weight decay."""
    return Tensor(shape, split, std, decay=True, pad_to=pad_to)


def bias(shape: tuple[int, ...], split: int | None = None) -> Tensor:
    """Declare a bias, which starts at 0 and has no weight decay."""
    return Tensor(shape, split)


def gain(shape: tuple[int, ...]) -> Tensor:
    """Declare the weight of a layer norm, which starts at 1 and has no weight decay."""
    return Tensor(shape, fill=1.0)


# ---- trees ----------------------------------------------------------------------------------------------------


def children(tree) -> list[tuple[Any, Any]] | None:
    """Return the (key, subtree) pairs of a dataclass or a dict; None for a leaf. A `Tensor` is a leaf."""
    if isinstance(tree, dict):
        return list(tree.items())
    if isinstance(tree, Shared):
        return [("shared", tree.shared)]
    if is_dataclass(tree) and not isinstance(tree, Tensor):
        return [(f.name, getattr(tree, f.name)) for f in fields(tree)]
    return None


def leaves(tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) pairs in declaration order. A subtree that a stage does not hold is None and has no leaves."""
    below = children(tree)
    if below is None:
        if tree is not None:
            yield prefix, tree
        return
    for key, subtree in below:
        yield from leaves(subtree, f"{prefix}.{key}" if prefix else str(key))


def tree_map(function, tree, *others):
    """Return a tree of the same form, with function(leaf, *leaves of the others) in place of each leaf."""
    below = children(tree)
    if below is None:
        return None if tree is None else function(tree, *others)
    if isinstance(tree, dict):
        return {key: tree_map(function, subtree, *(other[key] for other in others)) for key, subtree in below}
    return replace(tree, **{key: tree_map(function, subtree, *(getattr(other, key) for other in others))
                            for key, subtree in below})


def assign(view, values) -> None:
    """Copy the elements of one array into another, for tree_map over views of a buffer."""
    view[...] = values


def with_names(tree, prefix: str = ""):
    """Return a tree of (name, leaf) pairs, for a tree_map that needs names. The tree's own name is `prefix`."""
    named = leaves(tree, prefix)
    return tree_map(lambda leaf: Named(*next(named)), tree)


class Named(NamedTuple):
    name: str
    leaf: Any


@dataclass(frozen=True)
class Shared(Mapping):
    """One subtree under the numbers of several layers, which all use it. A tree has its leaves once."""

    layers: tuple[int, ...]
    shared: Any

    def __getitem__(self, layer: int):
        if layer not in self.layers:
            raise KeyError(layer)
        return self.shared

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


# ---- initial values -------------------------------------------------------------------------------------------


def initialize(tensors, seed: int, dtype):
    """Draw the whole initial parameters, each element a function of (seed, tensor name, index in the whole tensor)."""
    return tree_map(lambda named: draw(named, named.leaf.shape, 0, seed, HOST).astype(dtype), with_names(tensors))


def initialize_shard(tensors, seed: int, dtype, t: int, rank: int, like=HOST, prefix: str = "", e: int = 1,
                     expert_rank: int = 0):
    """Draw rank `rank`'s shard of the same initial parameters, as `split` and `deal` would give it, without the rest.

    `like` is an array of the library that the parameters belong to; `prefix` is the name of a subtree of a model.
    """
    return tree_map(lambda named: draw(named, named.leaf.local_shape(t, e), rank // named.leaf.copies(t), seed, like,
                                       expert_rank).astype(dtype), with_names(tensors, prefix))


def draw(named: Named, shape, number: int, seed: int, like, expert_rank: int = 0):
    """Draw float64 [shape], the shard of a tensor that begins at number x shape along its split axis, and likewise at
    the experts of a rank. Padding is 0.
    """
    name, tensor = named
    if tensor.std == 0:
        return np.full_like(like, tensor.fill, shape=shape, dtype=np.float64)
    first = [number * length if axis == tensor.split else 0 for axis, length in enumerate(shape)]
    if tensor.dealt:
        first[0] = expert_rank * shape[0]
    index = counter_rng.indices(shape, tensor.shape, first, like)
    x = tensor.fill + tensor.std * counter_rng.normal(counter_rng.key(seed, "weights", name), index)
    if tensor.split is None:
        return x
    inside = counter_rng.coordinates(shape, tensor.split, first[tensor.split], like) < tensor.shape[tensor.split]
    return np.where(inside, x, 0.0)


# ---- split and joined -----------------------------------------------------------------------------------------


def split(params, tensors, t: int) -> list:
    """Return t ranks' shards of whole parameters (or gradients), padded and sharded along each tensor's split axis."""
    return [tree_map(lambda x, tensor, rank=rank: shard(x, tensor, t, rank), params, tensors) for rank in range(t)]


def shard(x, tensor: Tensor, t: int, rank: int, e: int = 1, expert_rank: int = 0):
    """Return rank `rank`'s shard of the whole tensor x, or x itself where the tensor is replicated; of its experts."""
    if tensor.dealt:
        x = np.split(x, e)[expert_rank]
    if tensor.split is None:
        return x
    shards, padding = t // tensor.copies(t), [(0, 0)] * x.ndim
    padding[tensor.split] = (0, tensor.padded(shards) - x.shape[tensor.split])
    return np.split(np.pad(x, padding), shards, tensor.split)[rank // tensor.copies(t)]


def join(shards: list, tensors):
    """Return the whole parameters (or gradients) from those of t ranks, without padding: the inverse of `split`."""
    return tree_map(lambda tensor, *parts: whole(parts, tensor), tensors, *shards)


def whole(parts, tensor: Tensor):
    """Concatenate all ranks' shards, in rank order and without copies, to the whole tensor."""
    if tensor.split is None:
        return parts[0]
    length = tensor.shape[tensor.split]
    parts = parts[::tensor.copies(len(parts))]
    return np.concatenate(parts, tensor.split)[(slice(None),) * tensor.split + (slice(length),)]


def deal(params, tensors, e: int) -> list:
    """Return e ranks' parts of parameters (or gradients): E/e neighbours of each stack of experts, all of the others.
    """
    return [tree_map(lambda x, tensor, rank=rank: np.split(x, e)[rank] if tensor.dealt else x, params, tensors)
            for rank in range(e)]


def join_experts(parts: list, tensors, own: int = 0):
    """Return the parameters (or gradients) with all experts, from those of e ranks: the inverse of `deal`. What is not
    dealt out is that of rank `own`.
    """
    return tree_map(lambda tensor, *each: np.concatenate(each) if tensor.dealt else each[own], tensors, *parts)
