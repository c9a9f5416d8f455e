"""Buffers: a rank's elements of a flat buffer, in a whole buffer, in a shard, or in an offloaded shard.

The optimizer, or a sum over a few ranks, works on them piece by piece: it loads a piece, `buffer.load(piece)`, changes
the values, and stores them, `buffer.store(piece, values)`.
"""
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from tempfile import TemporaryFile

import numpy as np

from mpi_impl.runtime import pinned
from mpi_impl.runtime.arrays import moved_to, on_device, to_host
from reference.parallel.layout import Piece


class Buffer(ABC):
    """Elements on the device that computes: a loaded piece is a view, and storing a view in its place moves nothing."""

    def __init__(self, flat):
        self.flat = flat

    @abstractmethod
    def place(self, piece: Piece) -> slice:
        """Return where a piece lies in this buffer."""

    def load(self, piece: Piece):
        """Return a piece's elements."""
        return self.flat[self.place(piece)]

    def on_host(self, pieces: Iterable[Piece]) -> Iterable[tuple[Piece, np.ndarray]]:
        """Yield the elements of pieces in the host's memory: views. From a device they come in parts, each of which is
        there until the next one is asked for.
        """
        views = [(piece, self.flat[self.place(piece)]) for piece in pieces]
        if not on_device(self.flat):
            return views
        return pinned.on_host([(piece, part) for piece, x in views for _, part in pinned.parts_of(x)])

    def store(self, piece: Piece, values) -> None:
        """Give a piece these values."""
        own = self.load(piece)
        if not np.may_share_memory(own, values):
            own[...] = values

    @property
    def device_bytes(self) -> int:
        """Return the bytes in the memory of the device that computes."""
        return self.flat.nbytes

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes in other memory."""
        return 0


class Whole(Buffer):
    """A buffer of the layout's size."""

    def place(self, piece: Piece) -> slice:
        return piece.in_buffer


class Shard(Buffer):
    """A buffer of the shard's size."""

    def place(self, piece: Piece) -> slice:
        return piece.in_shard


class OffloadedShard(Shard):
    """A shard in host memory or in a file. A loaded piece is a copy, whose changes count only once they are stored.

    A rank with a GPU computes in the GPU's memory and offloads to the host's. A rank without one keeps the same rules:
    it offloads to a host buffer that it never computes in, or to a file, with which it can train a larger model.
    """

    def __init__(self, size: int, dtype, device_prototype, folder: str | None = None):
        """Allocate zeros. `device_prototype` is an array on the device that computes. A file is made in the folder,
        without a name: it disappears with the rank. Raises OSError if it cannot be made.
        """
        self.device_prototype = device_prototype
        if folder is None:
            super().__init__(np.zeros_like(to_host(device_prototype), shape=size, dtype=dtype))
        else:
            self.file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open for as long as the shard lives
            reserve(self.file.fileno(), size * np.dtype(dtype).itemsize)
            mapped = np.memmap(self.file, dtype, "r+", shape=(size,)) if size else np.zeros(0, dtype)
            super().__init__(np.asarray(mapped))

    def load(self, piece: Piece):
        """Return a copy on the device."""
        own = super().load(piece)
        moved = moved_to(own, self.device_prototype)
        return own.copy() if moved is own else moved

    def store(self, piece: Piece, values) -> None:
        self.flat[self.place(piece)] = to_host(values)

    @property
    def device_bytes(self) -> int:
        return 0

    @property
    def offloaded_bytes(self) -> int:
        return self.flat.nbytes


def reserve(file: int, size: int) -> None:
    """Extend an empty file to this size. Where the system can, reserve its room on the disk now: once the file is
    mapped as memory, a full disk would not be an error but the end of the process.
    """
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.truncate(file, size)
