"""The flat buffer under a rank's tensors: where each one lies, in which bucket, and which part is whose.

One layout serves the buffers of parameters, gradients and moments alike. Tensors lie in backward order, last layer
first. A *unit* is what is used together: a block, the final layer norm, a table. A *bucket* is a run of whole units
that is sent at once. Where replicas divide the work (ZeRO), every bucket is padded so that it divides, and rank i of
them owns the i-th part of each: an offset and a length, whatever tensors begin or end in between.

    bucket 0                     bucket 1          of 2 replicas, rank 0 owns a and c:
    [      a      |      b     ] [   c   |   d  ]  its *shard*, one after the other
"""
from dataclasses import replace
from math import prod
from typing import NamedTuple

from reference.config import round_up
from reference.params import Tensor, children, leaves, tree_map, with_names

SEVERAL = ("blocks", "embedding")    # parts of a model that are several units
ALONE = "embedding.word"    # shares no bucket: of a table that two stages hold, a replica owns the same part in both


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
    """A tensor, or the part of it that a shard owns."""

    segment: Segment
    whole: slice    # in the flat buffer
    own: slice      # in the shard


class Layout:
    """Where each tensor of a rank lies in one flat buffer, and in which bucket."""

    def __init__(self, tensors, t: int = 1, bucket_size: int = 1 << 62, parts: int = 1):
        """Buckets have at least `bucket_size` elements, if there are so many, and are padded to divide by `parts`."""
        self.tensors, self.parts = tensors, parts
        self.segments: list[Segment] = []
        self.buckets: list[Bucket] = []
        self.size, first, units = 0, 0, list[str]()     # elements; where the bucket begins, and its units so far
        backward = list(reversed(list(leaves(tensors))))
        for (name, tensor), following in zip(backward, [unit_of(name) for name, _ in backward[1:]] + [""]):
            self.segments.append(Segment(name, self.size, tensor.local_shape(t), tensor))
            self.size = self.segments[-1].slice.stop
            if (unit := unit_of(name)) == following:
                continue
            units.append(unit)
            if self.size - first >= bucket_size or ALONE in (unit, following) or not following:
                self.size = first + round_up(self.size - first, parts)
                self.buckets.append(Bucket(first, self.size, tuple(units)))
                first, units = self.size, []
        self.by_name = {segment.name: segment for segment in self.segments}
        self.home = {unit: bucket for bucket in self.buckets for unit in bucket.units}

    @property
    def shard_size(self) -> int:
        """Elements that each of the replicas owns."""
        return self.size // self.parts

    def own(self, bucket: Bucket, rank: int) -> slice:
        """Rank `rank`'s part of a bucket, in the flat buffer."""
        n = bucket.size // self.parts
        return slice(bucket.start + rank * n, bucket.start + (rank + 1) * n)

    def in_shard(self, bucket: Bucket) -> slice:
        """Where each rank's part of a bucket lies in its shard."""
        return slice(bucket.start // self.parts, bucket.stop // self.parts)

    def pieces(self, rank: int) -> list[Piece]:
        """The tensors, and parts of tensors, that rank `rank` of the replicas owns, in the order of its shard."""
        found = []
        for bucket in self.buckets:
            part, shift = self.own(bucket, rank), self.in_shard(bucket).start - self.own(bucket, rank).start
            for segment in self.segments:
                start, stop = max(part.start, segment.slice.start), min(part.stop, segment.slice.stop)
                if start < stop:
                    found.append(Piece(segment, slice(start, stop), slice(start + shift, stop + shift)))
        return found

    def views(self, flat):
        """The tree of tensors as views of the buffer flat [size]: what is written to one is written to the other."""
        return self.views_of(self.tensors, flat)

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
