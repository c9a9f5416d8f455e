"""Contiguous buffers for arrays that are views, and for the ranks' pieces along any axis."""
from math import prod

import numpy as np

from mpi_impl.runtime.arrays import contiguous


def copy_back(buffer, x) -> None:
    """Copy the buffer that stood in for x to x."""
    if buffer is not x:
        x[...] = buffer


def room_for_pieces(out, size: int, axis: int):
    """Return a buffer for the pieces of out along the axis, one after the other: out itself if they lie so there."""
    if prod(out.shape[:axis % out.ndim]) == 1:
        return out
    piece = [n // size if i == axis % out.ndim else n for i, n in enumerate(out.shape)]
    return np.empty_like(out, order="C", shape=(size, *piece))


def join_pieces(pieces, out, axis: int) -> None:
    """Copy the pieces from their buffer to out."""
    if pieces is not out:
        for part, piece in zip(np.split(out, len(pieces), axis), pieces, strict=True):
            part[...] = piece


def split_in_pieces(x, size: int, axis: int):
    """Return the pieces of x along the axis, one after the other in a contiguous array."""
    pieces = room_for_pieces(x, size, axis)
    if pieces is x:
        return contiguous(x)
    for piece, part in zip(pieces, np.split(x, size, axis), strict=True):
        piece[...] = part
    return pieces


def finish_device() -> None:
    """Wait until the device has done everything on the current stream."""
    import cupy
    cupy.cuda.get_current_stream().synchronize()
