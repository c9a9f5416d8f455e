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

Muon updates whole matrices. So with it these are in buckets of their own, behind all others, and the parts of such a
bucket are not equal: each is all that one owner has of it, whole tensors, dealt out so that all owners have about as
much to compute. (Shards have room for the largest owner's: so all ranks hold the same bytes.) What is in front is
Adam's, which has one state more.

    bucket 0               bucket 1, of matrices     of 2 replicas, rank 0 owns a, e and c:
    [    a    |    b     ] [     e     | c |   d  ]  its parts are [e, c] and [d]
"""
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from reference.config import round_up
from reference.optimizers.muon import is_matrix, multiplications
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
    matrix: bool = False      # whether it is Muon's, and has one owner

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + prod(self.shape))


class Bucket(NamedTuple):
    """A slice of a flat buffer that is sent in one message, and the units in it."""

    start: int                # of its elements, padding included
    stop: int
    units: tuple[str, ...]
    parts: int = 1            # into which it is divided among the ranks that hold copies of it
    dealt: bool = False       # whether it has experts, which are dealt out
    ends: tuple[int, ...] = ()   # of parts that are not equal, from `start` on; () for equal ones

    def part(self, i: int) -> slice:
        """Return the place of its i-th part in the buffer."""
        if self.ends:
            return slice(self.ends[i], self.ends[i + 1])
        n = self.size // self.parts
        return slice(self.start + i * n, self.start + (i + 1) * n)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def sizes(self) -> list[int] | None:
        """Return the sizes of parts that are not equal; None for equal ones."""
        return [stop - start for start, stop in pairwise(self.ends)] if self.ends else None


class Piece(NamedTuple):
    """The part of a tensor, or of a bucket, that a rank owns."""

    of: Any             # the Segment, or the Bucket
    in_buffer: slice    # its place in the flat buffer
    in_shard: slice     # and in the rank's shard

    @property
    def size(self) -> int:
        return size_of(self.in_shard)


class Layout:
    """The offset and the bucket of each tensor in a rank's flat buffer."""

    def __init__(self, tensors, t: int = 1, bucket_size: int = 1 << 62, parts: int = 1, e: int = 1,
                 whole_matrices: bool = False):
        """Lay out the tensors in buckets of at least `bucket_size` elements, where possible, padded for `parts`, or for
        parts / e where they are of experts that are dealt out to e ranks. With `whole_matrices` each has one owner.
        """
        self.tensors, self.t, self.parts, self.e = tensors, t, parts, e
        self.segments: list[Segment] = []
        self.buckets: list[Bucket] = []
        self.size = 0               # elements
        backwards = list(reversed(list(leaves(tensors))))
        for matrix in (False, True):
            for dealt in (False, True):
                self.lay_out([(name, tensor) for name, tensor in backwards
                              if (whole_matrices and is_matrix(tensor), tensor.dealt and e > 1) == (matrix, dealt)],
                             bucket_size, dealt, matrix)
        self.by_name = {segment.name: segment for segment in self.segments}
        self.units = dict(pair for _, pair in leaves(map_units(lambda *pair: pair, tensors)))   # trees of tensors
        self.all_buckets_of: dict[str, list[Bucket]] = {}
        for bucket in self.buckets:
            for unit in bucket.units:
                self.all_buckets_of.setdefault(unit, []).append(bucket)
        self.bucket_of = {unit: first for unit, (first, *_) in self.all_buckets_of.items()}
        self.adam_size = sum(bucket.size // bucket.parts for bucket in self.buckets if not bucket.ends)
        self.shard_size = self.adam_size + self.most_of_matrices()      # of each replica
        self.starts: dict[int, dict[Bucket, int]] = {}      # of the buckets' parts in the shards of some ranks

    def lay_out(self, tensors: list[tuple[str, Tensor]], bucket_size: int, dealt: bool, matrix: bool) -> None:
        """Lay out tensors of one kind."""
        parts = max(1, self.parts // self.e) if dealt else self.parts
        costs = [0] * parts         # what each owner of matrices has to compute
        segments = [Segment(name, 0, tensor.local_shape(self.t, self.e), tensor, tensor.copies(self.t), matrix)
                    for name, tensor in tensors]
        for units, together in in_buckets(segments, bucket_size):
            start, ends = self.size, [self.size]
            for owned in deal_out(together, costs) if matrix else [together]:
                for segment in owned:
                    self.segments.append(segment._replace(offset=self.size))
                    self.size = self.segments[-1].slice.stop
                ends.append(self.size)
            self.size = self.size if matrix else start + round_up(self.size - start, parts)
            self.buckets.append(Bucket(start, self.size, units, parts, dealt, tuple(ends) if matrix else ()))

    def most_of_matrices(self) -> int:
        """Return the elements of matrices that the largest owner has."""
        owned = np.zeros(self.parts, int)
        for bucket in self.buckets:
            if bucket.ends:
                owned += np.repeat(np.diff(bucket.ends), self.parts // bucket.parts)
        return int(owned.max())

    def buckets_of(self, unit: str) -> list[Bucket]:
        """Return the buckets of a unit: one, and others for its matrices and for experts that are dealt out."""
        return self.all_buckets_of.get(unit, [])

    def owned_piece(self, bucket: Bucket, rank: int) -> Piece:
        """Return the part of a bucket that replica `rank` owns. (e neighbours hold different experts.)"""
        if rank not in self.starts:
            stops = accumulate(size_of(self.part(other, rank)) for other in self.buckets)
            self.starts[rank] = dict(zip(self.buckets, [0, *stops]))
        own, start = self.part(bucket, rank), self.starts[rank][bucket]
        return Piece(bucket, own, slice(start, start + size_of(own)))

    def part(self, bucket: Bucket, rank: int) -> slice:
        """Return the place of that part in the buffer."""
        return bucket.part(rank * bucket.parts // self.parts)

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


def in_buckets(segments: Sequence[Segment], bucket_size: int) -> Iterator[tuple[tuple[str, ...], list[Segment]]]:
    """Yield the units and the tensors of each bucket."""
    units, together, size = list[str](), list[Segment](), 0
    for unit, segments_of in groupby(segments, lambda segment: unit_of(segment.name)):
        if units and (size >= bucket_size or {unit, units[-1]} & set(ALONE)):
            yield tuple(units), together
            units, together, size = [], [], 0
        units.append(unit)
        for segment in segments_of:
            together.append(segment)
            size += prod(segment.shape)
    if units:
        yield tuple(units), together


def deal_out(matrices: Sequence[Segment], costs: list[int]) -> list[list[Segment]]:
    """Return the matrices of each owner, and add to what they have to compute. The costliest is dealt out first, and
    each goes to the owner who has the least to compute so far (Graham 1969), in the buckets before, too.
    """
    owned: list[list[Segment]] = [[] for _ in costs]
    for segment in sorted(matrices, key=lambda segment: -multiplications(segment.tensor)):
        owner = costs.index(min(costs))
        owned[owner].append(segment)
        costs[owner] += multiplications(segment.tensor)
    return owned


def size_of(run: slice) -> int:
    return run.stop - run.start


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
