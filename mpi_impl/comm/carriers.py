"""What MPI gets for an array: one on the host as it is; one on a device by way of host memory, or as it is, too.

A carrier lends a buffer for an array, and gives back what has come in it. No array on the host pays for devices: it is
its own buffer.
"""
from math import prod
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.nccl import NCCL

BACKENDS = ("nccl", "mpi", "staged")     # three ways: without --distributed-backend, the first that is possible


class Carrier:
    """For arrays on the host."""

    def to_buffer(self, x, filled: bool = True):
        """A contiguous array with x's elements, or with any, where it need not be filled: x itself if it can be."""
        return np.ascontiguousarray(x)

    def empty(self, shape, x):
        """A buffer of this shape for what shall be where x is, and have its dtype."""
        return np.empty(shape, x.dtype)

    def take(self, buffer, x):
        """What has come in a buffer, where x is."""
        return buffer

    def copy_back(self, buffer, x) -> None:
        """x gets the elements of the buffer that stood in for it."""
        if buffer is not x:
            x[...] = self.take(buffer, x)


class Staged(Carrier):
    """For arrays on a device: they go through host memory, by copies that are over when the call is."""

    def allocate(self, shape, dtype) -> np.ndarray:
        return np.empty(shape, dtype)

    def to_buffer(self, x, filled=True):
        buffer = self.allocate(x.shape, x.dtype)
        if filled:
            x.get(out=buffer)
        return buffer

    def empty(self, shape, x):
        return self.allocate(shape, x.dtype)

    def take(self, buffer, x):
        y = np.empty_like(x, order="C", shape=buffer.shape)
        y.set(buffer)
        return y


class Pinned(Staged):
    """Through host memory that stays where it is, so that a device can read and write it by itself. CuPy keeps such
    memory for the next who wants some.
    """

    def allocate(self, shape, dtype):
        import cupy
        return np.ndarray(shape, dtype, cupy.cuda.alloc_pinned_memory(prod(shape) * dtype.itemsize))

    def take(self, buffer, x):
        y = super().take(buffer, x)
        finish()        # `set` has only begun, and the buffer may be someone else's as soon as nobody holds it
        return y


class Direct(Carrier):
    """For arrays on a device that MPI reads and writes by itself. MPI knows nothing of streams: group.py lets the
    device finish before each call.
    """

    def to_buffer(self, x, filled=True):
        return x if x.flags.c_contiguous else x.copy()

    def empty(self, shape, x):
        return np.empty_like(x, order="C", shape=shape)


class Carriers(NamedTuple):
    """How the arrays on a run's devices go from rank to rank.

    With NCCL it does the collectives. Messages from one rank to another are MPI's in any case: those of a schedule
    cross, and NCCL, which has no tags, would take them in the order in which they were posted.
    """

    mpi: Carrier = Staged()
    nccl: NCCL | None = None


ON_HOST = Carrier()


def finish() -> None:
    """Wait until the device has done all that it was told on the current stream."""
    import cupy
    cupy.cuda.get_current_stream().synchronize()
