"""Where a rank's own part of a flat buffer is: in a whole buffer, in a shard of its own, or in far memory.

Who works on it (the optimizer, a sum over a few ranks) goes through it piece by piece, `buffer.load(piece)`, changes
what it gets, and gives it back, `buffer.store(piece, values)`.
"""
import os
from abc import ABC, abstractmethod
from tempfile import TemporaryFile

import numpy as np

from mpi_impl.runtime.arrays import address, moved_to, to_host
from reference.parallel.layout import Piece


class Buffer(ABC):
    """Elements of a rank, near at hand: what is loaded is a view, and storing a view where it is moves nothing."""

    def __init__(self, flat):
        self.flat = flat

    @abstractmethod
    def place(self, piece: Piece) -> slice:
        """Where a piece lies."""

    def load(self, piece: Piece):
        """A piece's elements."""
        return self.flat[self.place(piece)]

    def store(self, piece: Piece, values) -> None:
        """Give a piece these values. What was loaded is there already."""
        own = self.load(piece)
        if address(own) != address(values):
            own[...] = values

    @property
    def device_bytes(self) -> int:
        return self.flat.nbytes

    @property
    def offloaded_bytes(self) -> int:
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
    """A shard in far memory: a host buffer, or a file. What is loaded is a copy, which only counts once it is stored.

    A rank with a GPU has its device's memory near and the host's far away. A rank without one keeps the same rules: its
    far memory is a host buffer that it never computes in, or a file, which is what lets it train a larger model.
    """

    def __init__(self, size: int, dtype, device_prototype, folder: str | None = None):
        """`device_prototype` is an array of the library that computes. A file is made in the folder, without a name: it is gone
        when the rank is. Raises OSError if it cannot be made.
        """
        self.device_prototype = device_prototype
        if folder is None:
            super().__init__(np.zeros(size, dtype))
        else:
            self.file = TemporaryFile(dir=folder)    # noqa: SIM115 - open for as long as the shard lives
            reserve(self.file.fileno(), size * np.dtype(dtype).itemsize)
            super().__init__(np.memmap(self.file, dtype, "r+", shape=(size,)) if size else np.zeros(0, dtype))

    def load(self, piece: Piece):
        """A near copy."""
        return moved_to(np.array(super().load(piece)), self.device_prototype)

    def store(self, piece: Piece, values) -> None:
        self.flat[self.place(piece)] = to_host(values)

    @property
    def device_bytes(self) -> int:
        return 0

    @property
    def offloaded_bytes(self) -> int:
        return self.flat.nbytes


def reserve(file: int, size: int) -> None:
    """Make an empty file so long. Where the system lets us, room is found now: a full disk is no error while it is read
    and written as memory, but the end of the process.
    """
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.truncate(file, size)
