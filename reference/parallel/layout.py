"""The flat buffer of a rank's tensors: the offset of each tensor, its bucket, and the owner of each element.

One layout serves the buffers of parameters, gradients and moments. Tensors lie in backward order, last layer first. A
*unit* is a set of tensors that are used together: a block, the final layer norm, a table. A *bucket* is a run of whole
units that is sent in one message. With ZeRO, every bucket is padded so that the number of replicas divides it, and
replica i owns the i-th part of each: an offset and a length, whatever tensors begin or end in between.

    bucket 0                     bucket 1          of 2 replicas, rank 0 owns a and c:
    [      a      |      b     ] [   c   |   d  ]  its *shard*, one after the other

With expert parallelism there are two kinds of tensors: experts, of which e neighbours among the replicas hold different
ones, and all others. They lie in different buckets of the same buffer, those of experts at its end. Each bucket has a
group of ranks that hold copies of it, all replicas or 1/e of them, and is summed and divided among those. This is all
that ZeRO, the optimizer, and checkpoints have to know: pieces are pieces.
"""
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from reference.config import round_up
from reference.params import Tensor, children, leaves, tree_map, with_names

SEVERAL = ("blocks", "embedding")    # subtrees of a model that are several units
SHARED_BLOCK = "blocks.shared"       # the one that all layers use, if they share their parameters
ALONE = ("embedding.word", SHARED_BLOCK)   # in buckets of their own: a replica owns the same part of each stage's copy


class Segment(NamedTuple):
    """One tensor's place in a rank's flat buffer."""

    name: str
    offset: int               # of its first element
    shape: tuple[int, ...]    # of the rank's shard, padding included
    tensor: Tensor
    copies: int = 1           # neighbouring tensor-parallel ranks that hold these elements

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + prod(self.shape))


class Bucket(NamedTuple):
    """A slice of a flat buffer that is sent in one message, and the units in it."""

    start: int                # of its elements, padding included
    stop: int
    units: tuple[str, ...]
    parts: int = 1            # into which it is divided among the ranks that hold copies of it
    shard_start: int = 0      # where a rank's part lies in its shard
    dealt: bool = False       # whether it has experts, which are dealt out

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start


class Piece(NamedTuple):
    """The part of a tensor, or of a bucket, that a rank owns."""

    of: Any             # the Segment, or the Bucket
    in_buffer: slice    # its place in the flat buffer
    in_shard: slice     # and in the rank's shard

    @property
    def size(self) -> int:
        return self.in_shard.stop - self.in_shard.start


class Layout:
    """The offset and the bucket of each tensor in a rank's flat buffer."""

    def __init__(self, tensors, t: int = 1, bucket_size: int = 1 << 62, parts: int = 1, e: int = 1):
        """Lay out the tensors in buckets of at least `bucket_size` elements, where possible, padded for `parts`, or for
        parts / e where they are of experts that are dealt out to e ranks.
        """
        self.tensors, self.parts, self.e = tensors, parts, e
        self.segments: list[Segment] = []
        self.buckets: list[Bucket] = []
        self.size = self.shard_size = 0      # elements, and those that each replica owns
        backwards = list(reversed(list(leaves(tensors))))
        for dealt in (False, True):
            self.lay_out([(name, tensor) for name, tensor in backwards if (tensor.dealt and e > 1) == dealt], t,
                         bucket_size, dealt)
        self.by_name = {segment.name: segment for segment in self.segments}
        self.units = dict(pair for _, pair in leaves(map_units(lambda *pair: pair, tensors)))   # trees of tensors
        self.bucket_of = {unit: bucket for bucket in self.buckets for unit in bucket.units if not bucket.dealt}
        self.dealt_bucket_of = {unit: bucket for bucket in self.buckets for unit in bucket.units if bucket.dealt}

    def lay_out(self, tensors: list[tuple[str, Tensor]], t: int, bucket_size: int, dealt: bool) -> None:
        """Lay out tensors of one kind."""
        first, units = self.size, list[str]()     # the bucket's start and units so far
        for unit, named in groupby(tensors, lambda pair: unit_of(pair[0])):
            if units and (self.size - first >= bucket_size or {unit, units[-1]} & set(ALONE)):
                first, units = self.close_bucket(first, units, dealt), []
            for name, tensor in named:
                self.segments.append(Segment(name, self.size, tensor.local_shape(t, self.e), tensor, tensor.copies(t)))
                self.size = self.segments[-1].slice.stop
            units.append(unit)
        if units:
            self.close_bucket(first, units, dealt)

    def close_bucket(self, first: int, units: list[str], dealt: bool) -> int:
        """End a bucket here, padded, and return the start of the next."""
        parts = max(1, self.parts // self.e) if dealt else self.parts
        self.size = first + round_up(self.size - first, parts)
        self.buckets.append(Bucket(first, self.size, tuple(units), parts, self.shard_size, dealt))
        self.shard_size += (self.size - first) // parts
        return self.size

    def buckets_of(self, unit: str) -> list[Bucket]:
        """Return the buckets of a unit: one, and another for experts that are dealt out."""
        return [found[unit] for found in (self.bucket_of, self.dealt_bucket_of) if unit in found]

    def owned_piece(self, bucket: Bucket, rank: int) -> Piece:
        """Return the part of a bucket that replica `rank` owns. (e neighbours hold different experts.)"""
        n, part = bucket.size // bucket.parts, rank * bucket.parts // self.parts
        return Piece(bucket, slice(bucket.start + part * n, bucket.start + (part + 1) * n),
                     slice(bucket.shard_start, bucket.shard_start + n))

    def pieces(self, rank: int) -> list[Piece]:
        """Return the tensors, and parts of tensors, that replica `rank` owns, in the order of its shard."""
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
        """Return the tree of tensors as views of the buffer flat [size]."""
        return self.views_of(self.tensors, flat)

    def unit_views(self, unit: str, *flats):
        """Return a unit's tensors as views of its buckets alone, flat [bucket.size] each."""
        buckets = self.buckets_of(unit)

        def view(named):
            segment = self.by_name[named.name]
            return next(segment_view(segment, flat, bucket.start) for bucket, flat in zip(buckets, flats, strict=True)
                        if bucket.start <= segment.offset < bucket.stop)

        return tree_map(view, with_names(self.units[unit], unit))

    def views_of(self, tensors, flat, prefix: str = ""):
        """Return a subtree, called `prefix` in the whole one, as views of the buffer flat [size]."""
        return tree_map(lambda named: segment_view(self.by_name[named.name], flat), with_names(tensors, prefix))


def segment_view(segment: Segment, flat, first: int = 0):
    """Return a tensor as a view of a buffer that begins at element `first` of the whole one."""
    return flat[segment.offset - first:segment.slice.stop - first].reshape(segment.shape)


def unit_of(name: str) -> str:
    """Return the unit of a tensor: 'blocks.3.mlp.w_in' -> 'blocks.3', 'embedding.word' -> 'embedding.word'."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first in SEVERAL else first


def map_units(function, tree, name: str = ""):
    """Return a tree with function(name, subtree) in place of each unit of a model's tree."""
    if tree is None or name not in ("", *SEVERAL):
        return None if tree is None else function(name, tree)
    below = {key: map_units(function, subtree, f"{name}.{key}" if name else str(key))
             for key, subtree in children(tree) or ()}
    return below if isinstance(tree, dict) else replace(tree, **below)


def shared_pieces(pieces: list[Piece]) -> dict[int, list[Piece]]:
    """Return the pieces whose gradients are partial sums on neighbouring ranks, by the number of these neighbours."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.of.tensor.most_shards is not None and piece.of.copies > 1:
            found.setdefault(piece.of.copies, []).append(piece)
    return dict(sorted(found.items()))
