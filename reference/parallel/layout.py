"""The flat buffer under a rank's tensors: where each one lies, in which bucket, and which part is whose.

One layout serves the buffers of parameters, gradients and moments alike. Tensors lie in backward order, last layer
first. A *unit* is what is used together: a block, the final layer norm, a table. A *bucket* is a run of whole units
that is sent at once. Where replicas divide the work (ZeRO), every bucket is padded so that it divides, and rank i of
them owns the i-th part of each: an offset and a length, whatever tensors begin or end in between.

    bucket 0                     bucket 1          of 2 replicas, rank 0 owns a and c:
    [      a      |      b     ] [   c   |   d  ]  its *shard*, one after the other
"""
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from reference.config import round_up
from reference.params import Tensor, children, leaves, tree_map, with_names

SEVERAL = ("blocks", "embedding")    # parts of a model that are several units
ALONE = "embedding.word"    # in a bucket of its own: where two stages hold it, a replica owns the same part of both


class Segment(NamedTuple):
    """One tensor's place in a rank's flat buffer."""

    name: str
    offset: int               # of its first element
    shape: tuple[int, ...]    # of the rank's shard, padding included
    tensor: Tensor

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + prod(self.shape))


class Bucket(NamedTuple):
    """A piece of a flat buffer that is sent at once, and the units in it."""

    start: int                # of its elements, padding included
    stop: int
    units: tuple[str, ...]

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start


class Piece(NamedTuple):
    """What a rank owns of a tensor, or of a bucket."""

    of: Any             # the Segment, or the Bucket
    in_buffer: slice    # where it lies in the flat buffer
    in_shard: slice     # and in the rank's shard

    @property
    def size(self) -> int:
        return self.in_shard.stop - self.in_shard.start


class Layout:
    """Where each tensor of a rank lies in one flat buffer, and in which bucket."""

    def __init__(self, tensors, t: int = 1, bucket_size: int = 1 << 62, parts: int = 1):
        """Buckets have at least `bucket_size` elements, if there are so many, and are padded to divide by `parts`."""
        self.tensors, self.parts = tensors, parts
        self.segments: list[Segment] = []
        self.buckets: list[Bucket] = []
        self.size, first, units = 0, 0, list[str]()     # elements; where the bucket begins, and its units so far
        for unit, named in groupby(reversed(list(leaves(tensors))), lambda pair: unit_of(pair[0])):
            if units and (self.size - first >= bucket_size or ALONE in (unit, units[-1])):
                first, units = self.close_bucket(first, units), []
            for name, tensor in named:
                self.segments.append(Segment(name, self.size, tensor.local_shape(t), tensor))
                self.size = self.segments[-1].slice.stop
            units.append(unit)
        self.close_bucket(first, units)
        self.by_name = {segment.name: segment for segment in self.segments}
        self.units = dict(pair for _, pair in leaves(map_units(lambda *pair: pair, tensors)))   # trees of tensors
        self.bucket_of = {unit: bucket for bucket in self.buckets for unit in bucket.units}

    def close_bucket(self, first: int, units: list[str]) -> int:
        """A bucket ends here, padded -> where the next begins."""
        self.size = first + round_up(self.size - first, self.parts)
        self.buckets.append(Bucket(first, self.size, tuple(units)))
        return self.size

    @property
    def shard_size(self) -> int:
        """Elements that each of the replicas owns."""
        return self.size // self.parts

    def owned_piece(self, bucket: Bucket, rank: int) -> Piece:
        """Rank `rank`'s part of a bucket."""
        n = bucket.size // self.parts
        return Piece(bucket, slice(bucket.start + rank * n, bucket.start + (rank + 1) * n),
                     slice(bucket.start // self.parts, bucket.stop // self.parts))

    def pieces(self, rank: int) -> list[Piece]:
        """The tensors, and parts of tensors, that rank `rank` of the replicas owns, in the order of its shard."""
        found = []
        for bucket in self.buckets:
            _, own, in_shard = self.owned_piece(bucket, rank)
            shift = in_shard.start - own.start
            for segment in self.segments:
                start, stop = max(own.start, segment.slice.start), min(own.stop, segment.slice.stop)
                if start < stop:
                    found.append(Piece(segment, slice(start, stop), slice(start + shift, stop + shift)))
        return found

    def views(self, flat):
        """The tree of tensors as views of the buffer flat [size]: what is written to one is written to the other."""
        return self.views_of(self.tensors, flat)

    def unit_views(self, unit: str, flat):
        """A unit's tensors as views of its bucket alone, flat [bucket.size]."""
        return self.views_of(self.units[unit], flat, unit, self.bucket_of[unit].start)

    def views_of(self, tensors, flat, prefix: str = "", first: int = 0):
        """The same for a subtree, called `prefix` in the whole one, from a buffer that begins at element `first`."""
        def view(named):
            segment = self.by_name[named.name]
            return flat[segment.offset - first:segment.slice.stop - first].reshape(segment.shape)

        return tree_map(view, with_names(tensors, prefix))


def unit_of(name: str) -> str:
    """'blocks.3.mlp.w_in' -> 'blocks.3', 'embedding.word' -> 'embedding.word', 'output' -> 'output'."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first in SEVERAL else first


def map_units(function, tree, name: str = ""):
    """A tree with function(name, subtree) in place of each unit of a model's tree."""
    if tree is None or name not in ("", *SEVERAL):
        return None if tree is None else function(name, tree)
    below = {key: map_units(function, subtree, f"{name}.{key}" if name else str(key))
             for key, subtree in children(tree) or ()}
    return below if isinstance(tree, dict) else replace(tree, **below)
