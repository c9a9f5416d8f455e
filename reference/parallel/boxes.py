"""What a rank owns of a flat buffer, as boxes of whole tensors. A checkpoint keeps them: every topology can read those.

A rank's shard of a tensor is a box of the whole one, and what it owns of the shard is a run of its elements in C order.
A run is a few boxes, one after another:

    [ . . . a a ]     a run from the middle of one row to the middle of another
    [ b b b b b ]     is three boxes of a matrix:
    [ b b b b b ]     a part of a row, whole rows, a part of a row
    [ c . . . . ]
"""
from math import prod

from reference.parallel.layout import Piece

Box = tuple[slice, ...]      # of an array: along each axis from where to where; none of them empty


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(along.stop - along.start for along in box)


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Of an array's elements in C order those from `start` up to `stop`, as boxes that lie one after another.

    They are at most 2 n - 1, of n axes: whole rows make one box (b in the picture above), and what is left of the row
    before them (a) and of the row after them (c) are runs of their own, in arrays with an axis less.
    """
    if start >= stop:
        return []
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row       # the rows that are there whole
    if last < first:                                  # none, and no row ends inside the run
        return in_row(last, shape, start - last * row, stop - last * row)
    before = in_row(first - 1, shape, start - (first - 1) * row, row)
    whole = [(slice(first, last), *(slice(0, length) for length in shape[1:]))] if first < last else []
    return before + whole + in_row(last, shape, 0, stop - last * row)


def in_row(i: int, shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes of a run in row i alone."""
    return [(slice(i, i + 1), *box) for box in boxes_of_run(shape[1:], start, stop)]


def without_padding(pieces: list[Piece], tensor_rank: int) -> list[Piece]:
    """The pieces of tensor-parallel rank `tensor_rank`, less their padding, which is no part of the model.

    (Only tables are padded, and those along their first axis, so that padding is what comes last.)
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


def boxes_of_piece(piece: Piece, tensor_rank: int) -> list[Box]:
    """A piece of a tensor, without padding, as boxes of the whole tensor, in the order of the piece's elements."""
    segment = piece.of
    split = segment.tensor.split
    boxes = boxes_of_run(segment.shape, piece.in_buffer.start - segment.offset, piece.in_buffer.stop - segment.offset)
    if split is None:
        return boxes
    shift = tensor_rank * segment.shape[split]
    return [tuple(moved(along, shift) if axis == split else along for axis, along in enumerate(box)) for box in boxes]


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of an array have in common."""
    common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other))
    return common if all(along.start < along.stop for along in common) else None


def inside(box: Box, outer: Box) -> Box:
    """Where a box lies in one that holds it."""
    return tuple(moved(along, -first.start) for along, first in zip(box, outer))


def moved(along: slice, by: int) -> slice:
    return slice(along.start + by, along.stop + by)
