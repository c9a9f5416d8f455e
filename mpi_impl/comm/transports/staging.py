"""Arrays on a device through host memory: copied there, moved as an array of the host, and copied back."""
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.comm.transports.buffers import finish_device
from mpi_impl.comm.transports.nccl import NCCL
from mpi_impl.comm.transports.transport import AllToAll, Collectives, PointToPoint, PostedCollectives, Request
from mpi_impl.runtime import pinned
from mpi_impl.runtime.arrays import contiguous


class Staging:
    """Host buffers for arrays on a device. The copies are over when a call returns."""

    def like(self, x) -> np.ndarray:
        """Return an uninitialized buffer for x."""
        return np.empty(x.shape, x.dtype)

    def to_buffer(self, x) -> np.ndarray:
        """Return a buffer with the elements of x."""
        buffer = self.like(x)
        self.get(x, buffer)
        return buffer

    def copy_back(self, buffer, x) -> None:
        """Copy a buffer to x."""
        whole = x if x.flags.c_contiguous else np.empty_like(x, order="C")
        self.set(buffer, whole)
        if whole is not x:
            x[...] = whole

    def get(self, x, buffer) -> None:
        x.get(out=buffer)

    def set(self, buffer, x) -> None:
        x.set(buffer)


class PinnedStaging(Staging):
    """Host buffers in pinned memory, which a device reads and writes by itself. Larger ones go through pieces of it."""

    def like(self, x):
        return pinned.pinned_like(x) if x.nbytes <= pinned.PIECE else super().like(x)

    def get(self, x, buffer):
        if x.nbytes <= pinned.PIECE:
            x.get(out=buffer)
        else:
            pinned.copy_to_host(contiguous(x), buffer)

    def set(self, buffer, x):
        if x.nbytes <= pinned.PIECE:
            x.set(buffer)
            finish_device()     # `set` has only begun, and CuPy gives memory that nobody holds to the next caller
        else:
            pinned.copy_to_device(buffer, x)


class DevicePath(NamedTuple):
    """The path of arrays from device to device: collectives by NCCL, if it is there, all else by MPI.

    Messages are MPI's in any case: those of a schedule cross, and NCCL, which has no tags, would take them in the order
    in which they were posted.
    """

    staging: Staging | None = Staging()     # None: MPI reads and writes device memory, but for posted collectives
    nccl: NCCL | None = None


class StagedPosts(PostedCollectives):
    """Posted collectives of arrays on a device, by whichever transport takes their buffers on the host.

    A CUDA-aware MPI may need this, too: its blocking collectives read device memory, its nonblocking ones do not.
    """

    def __init__(self, staging: Staging, choose: Callable[[type, np.ndarray], Any]):
        self.staging, self.choose = staging, choose

    def post(self, operation, x, out, sizes=None):
        sent = self.staging.to_buffer(x)
        received = sent if out is x else self.staging.like(out)
        return self._copied(self.choose(PostedCollectives, sent).post(operation, sent, received, sizes), received, out)

    def _copied(self, request, buffer, x):
        """Return a request that ends with a copy of the buffer to the device."""
        return Request(request.done, request.wait, partial(self.staging.copy_back, buffer, x))


class StagedTransport(StagedPosts, Collectives, AllToAll, PointToPoint):
    """Everything else of arrays on a device, in the same way."""

    def all_reduce(self, x, op):
        buffer = self.staging.to_buffer(x)
        self.choose(Collectives, buffer).all_reduce(buffer, op)
        self.staging.copy_back(buffer, x)

    def all_gather(self, x, out, axis):
        sent, received = self.staging.to_buffer(x), self.staging.like(out)
        self.choose(Collectives, sent).all_gather(sent, received, axis)
        self.staging.copy_back(received, out)

    def reduce_scatter(self, x, out, axis):
        sent, received = self.staging.to_buffer(x), self.staging.like(out)
        self.choose(Collectives, sent).reduce_scatter(sent, received, axis)
        self.staging.copy_back(received, out)

    def broadcast(self, x, root):
        buffer = self.staging.to_buffer(x)
        self.choose(Collectives, buffer).broadcast(buffer, root)
        self.staging.copy_back(buffer, x)

    def all_to_all_rows(self, x, sent, out, received):
        buffer, arrived = self.staging.to_buffer(x), self.staging.like(out)
        self.choose(AllToAll, buffer).all_to_all_rows(buffer, sent, arrived, received)
        self.staging.copy_back(arrived, out)

    def post_send(self, x, to, tag):
        sent = self.staging.to_buffer(x)
        return self.choose(PointToPoint, sent).post_send(sent, to, tag)

    def post_receive(self, x, source, tag):
        received = self.staging.like(x)
        return self._copied(self.choose(PointToPoint, received).post_receive(received, source, tag), received, x)
