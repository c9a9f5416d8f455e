"""The shard of a flat buffer that a rank owns, as boxes of whole tensors. Checkpoints store boxes: every topology can
read them.

A rank's shard of a tensor is a box of the whole one, and what it owns of the shard is a run of elements in C order. A
run is a few boxes, one after another:

    [ . . . a a ]     a run from the middle of one row to the middle of another
    [ b b b b b ]     is three boxes of a matrix:
    [ b b b b b ]     the end of a row, whole rows, the beginning of a row
    [ c . . . . ]
"""
from math import prod

from reference.parallel.layout import Piece, Segment

Box = tuple[slice, ...]      # a range along each axis of an array, none of them empty


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(along.stop - along.start for along in box)


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Split the run from `start` up to `stop`, of an array's elements in C order, into consecutive boxes.

    An array of n axes gives at most 2 n - 1 boxes: the whole rows are one box (b in the picture above), and the rests
    of the row before them (a) and of the row after them (c) are runs of their own, in arrays with one axis less.
    """
    if start >= stop:
        return []
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row       # the whole rows
    if last < first:                                  # no whole row, and no row ends inside the run
        return in_row(last, shape, start - last * row, stop - last * row)
    before = in_row(first - 1, shape, start - (first - 1) * row, row)
    whole = [(slice(first, last), *(slice(0, length) for length in shape[1:]))] if first < last else []
    return before + whole + in_row(last, shape, 0, stop - last * row)


def in_row(i: int, shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the boxes of a run in row i alone."""
    return [(slice(i, i + 1), *box) for box in boxes_of_run(shape[1:], start, stop)]


def without_padding(pieces: list[Piece], tensor_rank: int) -> list[Piece]:
    """Return the pieces of tensor-parallel rank `tensor_rank` without their padding, which is not part of the model.

    (Only tables are padded, along their first axis, so the padding is at the end.)
    """
    found = []
    for segment, in_buffer, in_shard in pieces:
        rows, padding = segment.shape[0], 0
        if segment.tensor.pad_to:
            assert segment.tensor.split == 0, f"{segment.name} is padded, but not along its first axis"
            padding = min(max((tensor_rank + 1) * rows - segment.tensor.shape[0], 0), rows)
        stop = min(in_buffer.stop, segment.offset + (rows - padding) * prod(segment.shape[1:]))
        if in_buffer.start < stop:
            less = in_buffer.stop - stop
            found.append(Piece(segment, slice(in_buffer.start, stop), slice(in_shard.start, in_shard.stop - less)))
    return found


def boxes_of_piece(piece: Piece, tensor_rank: int, expert_rank: int = 0) -> list[Box]:
    """Return a piece of a tensor, without padding, as boxes of the whole tensor, in the order of its elements."""
    segment = piece.of
    boxes = boxes_of_run(segment.shape, piece.in_buffer.start - segment.offset, piece.in_buffer.stop - segment.offset)
    first = first_of_shard(segment, tensor_rank, expert_rank)
    return [tuple(map(shift, box, first)) for box in boxes]


def first_of_shard(segment: Segment, tensor_rank: int, expert_rank: int = 0) -> list[int]:
    """Return the indices, in the whole tensor, of the first element of a rank's shard."""
    first, tensor = [0] * len(segment.shape), segment.tensor
    if tensor.split is not None:
        first[tensor.split] = tensor_rank // segment.copies * segment.shape[tensor.split]
    if tensor.dealt:
        first[0] = expert_rank * segment.shape[0]
    return first


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of an array, or None."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other))
    return common if all(along.start < along.stop for along in common) else None


def inside(box: Box, outer: Box) -> Box:
    """Return the place of a box relative to a box that contains it."""
    return tuple(shift(along, -first.start) for along, first in zip(box, outer))


def shift(along: slice, by: int) -> slice:
    return slice(along.start + by, along.stop + by)
