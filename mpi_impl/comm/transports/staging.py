"""Arrays on a device through host memory: copied there, moved as an array of the host, and copied back."""
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.transports.buffers import finish_device
from mpi_impl.comm.transports.nccl import NCCL
from mpi_impl.comm.transports.transport import Call, Request, Transport

BACKENDS = ("nccl", "mpi", "staged")     # without --distributed-backend, the first that is possible


class Staging:
    """Host buffers for arrays on a device. The copies are over when a call returns."""

    def allocate(self, shape, dtype) -> np.ndarray:
        """Return an uninitialized buffer."""
        return np.empty(shape, dtype)

    def to_buffer(self, x) -> np.ndarray:
        """Return a buffer with the elements of x."""
        buffer = self.allocate(x.shape, x.dtype)
        x.get(out=buffer)
        return buffer

    def copy_back(self, buffer, x) -> None:
        """Copy a buffer to x."""
        whole = x if x.flags.c_contiguous else np.empty_like(x, order="C")
        whole.set(buffer)
        if whole is not x:
            x[...] = whole


class PinnedStaging(Staging):
    """Host buffers that stay where they are in memory, so that a device can read and write them by itself."""

    def allocate(self, shape, dtype):
        import cupy
        return np.ndarray(shape, dtype, cupy.cuda.alloc_pinned_memory(prod(shape) * dtype.itemsize))

    def copy_back(self, buffer, x):
        super().copy_back(buffer, x)
        finish_device()     # `set` has only begun, and CuPy gives the memory to the next caller when we let go of it


class DevicePath(NamedTuple):
    """How arrays on the devices of a run get from rank to rank: the collectives by NCCL, if it is there, all else by
    MPI. Messages are MPI's in any case: those of a schedule cross, and NCCL, which has no tags, would take them in the
    order in which they were posted.
    """

    staging: Staging | None = Staging()     # None: MPI reads and writes device memory by itself
    nccl: NCCL | None = None


class StagedTransport(Transport):
    """Arrays on a device, by whichever transport takes their buffers on the host."""

    def __init__(self, staging: Staging, choose: Callable[[Call, np.ndarray], Transport]):
        self.staging, self.choose = staging, choose

    def all_reduce(self, x, op):
        buffer = self.staging.to_buffer(x)
        self.choose(Call.COLLECTIVE, buffer).all_reduce(buffer, op)
        self.staging.copy_back(buffer, x)

    def all_gather(self, x, out, axis):
        sent, received = self.staging.to_buffer(x), self.staging.allocate(out.shape, out.dtype)
        self.choose(Call.COLLECTIVE, sent).all_gather(sent, received, axis)
        self.staging.copy_back(received, out)

    def reduce_scatter(self, x, out, axis):
        sent, received = self.staging.to_buffer(x), self.staging.allocate(out.shape, out.dtype)
        self.choose(Call.COLLECTIVE, sent).reduce_scatter(sent, received, axis)
        self.staging.copy_back(received, out)

    def broadcast(self, x, root):
        buffer = self.staging.to_buffer(x)
        self.choose(Call.COLLECTIVE, buffer).broadcast(buffer, root)
        self.staging.copy_back(buffer, x)

    def post(self, operation, x, out):
        sent = self.staging.to_buffer(x)
        received = sent if out is x else self.staging.allocate(out.shape, out.dtype)
        return StagedRequest(self.choose(Call.POSTED, sent).post(operation, sent, received), self.staging, received,
                             out)

    def post_send(self, x, to, tag):
        sent = self.staging.to_buffer(x)
        return self.choose(Call.MESSAGE, sent).post_send(sent, to, tag)

    def post_receive(self, x, source, tag):
        received = self.staging.allocate(x.shape, x.dtype)
        return StagedRequest(self.choose(Call.MESSAGE, received).post_receive(received, source, tag), self.staging,
                             received, x)


class StagedRequest(Request):
    """A request of the host's, whose result has to be copied to the device."""

    def __init__(self, request: Request, staging: Staging, buffer, x):
        self.request, self.staging, self.buffer, self.x = request, staging, buffer, x

    def done(self):
        done = self.request.done()
        if done:
            self.release()
        return done

    def wait(self):
        self.request.wait()
        self.release()

    def release(self) -> None:
        """Copy the buffer to x, once: x may be overwritten from now on."""
        if self.buffer is not None:
            self.staging.copy_back(self.buffer, self.x)
        self.buffer = self.x = None
