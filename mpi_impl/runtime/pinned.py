"""Copies between a device and the host through pinned memory, which the device reads and writes by itself.

CuPy rounds pinned memory up to a power of two and keeps it for good, and a container may allow little of it. So larger
arrays go through two pieces in turn: while the device works on one of them, the host works on the other.
"""
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np

PIECE = 1 << 26     # bytes
Parts = Sequence[tuple[Any, Any]]       # of flat arrays on a device, none larger than a piece, each with a name


def pinned_like(x) -> np.ndarray:
    """Return an uninitialized array in pinned memory, for no more than a piece."""
    import cupy
    return np.ndarray(x.shape, x.dtype, cupy.cuda.alloc_pinned_memory(x.nbytes))


def copy_to_host(x, out: np.ndarray) -> None:
    """Copy a contiguous array on a device to one on the host."""
    target = out.reshape(-1)
    for place, piece in on_host(parts_of(x)):
        target[place] = piece


def copy_to_device(host: np.ndarray, x) -> None:
    """Copy a contiguous array on the host to one on a device."""
    source = host.reshape(-1)
    for place, part, piece, end in in_turn(parts_of(x)):
        end.synchronize()       # until now the device has read what was there
        piece[...] = source[place]
        with part.device:
            part.set(piece)
            end.record()


def on_host(parts: Parts) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield each part in host memory, with its name. It is there until the next one is asked for."""
    before = None
    for name, part, piece, end in in_turn(parts):
        with part.device:
            part.get(out=piece, blocking=False)
            end.record()
        if before is not None:
            yield arrived(*before)
        before = name, piece, end
    if before is not None:
        yield arrived(*before)


def arrived(name, piece: np.ndarray, end) -> tuple[Any, np.ndarray]:
    """Wait for the end of the copy to a piece."""
    end.synchronize()
    return name, piece


def in_turn(parts: Parts) -> Iterator[tuple[Any, Any, np.ndarray, Any]]:
    """Yield each part, with its name, a piece of pinned memory for it, and an event for the end of their copy. There
    are two pieces with their events. The device has finished with both when this is over.
    """
    import cupy
    with parts[0][1].device:        # a thread begins on the first GPU
        both = [(cupy.cuda.alloc_pinned_memory(max(part.nbytes for _, part in parts)),
                 cupy.cuda.Event(disable_timing=True)) for _ in range(2)]
    try:
        for (name, part), (memory, end) in zip(parts, cycle(both)):
            yield name, part, np.ndarray(part.shape, part.dtype, memory), end
    finally:
        for _, end in both:
            end.synchronize()


def parts_of(x) -> Parts:
    """Return the parts of a contiguous array, each under the name of its place in the flat array."""
    flat, step = x.reshape(-1), PIECE // x.itemsize
    return [(slice(start, start + step), flat[start:start + step]) for start in range(0, x.size, step)]
