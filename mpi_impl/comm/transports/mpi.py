"""Arrays by MPI: in host memory, or on a device if this MPI is CUDA-aware."""
from functools import partial
from math import prod

import numpy as np
from mpi4py import MPI

from mpi_impl.comm.transports.buffers import copy_back, finish_device, join_pieces, room_for_pieces, split_in_pieces
from mpi_impl.comm.transports.transport import AllToAll, Collectives, PointToPoint, PostedCollectives, Request
from mpi_impl.runtime.arrays import contiguous, on_device

OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX}


class MPITransport(Collectives, AllToAll, PointToPoint, PostedCollectives):
    """MPI's own calls. MPI needs contiguous arrays, of formats that it knows (halves.py has the others)."""

    def __init__(self, comm: MPI.Intracomm):
        self.comm, self.size = comm, comm.size

    def all_reduce(self, x, op):
        buffer = contiguous(x)
        self.comm.Allreduce(MPI.IN_PLACE, ready(buffer), OPERATIONS[op])
        copy_back(buffer, x)

    def all_gather(self, x, out, axis):
        pieces = room_for_pieces(out, self.size, axis)
        self.comm.Allgather(ready(contiguous(x)), pieces)
        join_pieces(pieces, out, axis)

    def reduce_scatter(self, x, out, axis):
        self.comm.Reduce_scatter_block(ready(split_in_pieces(x, self.size, axis)), out, MPI.SUM)

    def broadcast(self, x, root):
        buffer = contiguous(x)
        self.comm.Bcast(ready(buffer), root)
        copy_back(buffer, x)

    def all_to_all(self, pieces, out) -> None:
        """Send the i-th of the pieces [size, ...] to rank i, and receive this rank's piece of every rank in out."""
        self.comm.Alltoall(ready(pieces), out)

    def all_to_all_rows(self, x, sent, out, received):
        row = prod(x.shape[1:])
        self.comm.Alltoallv([ready(contiguous(x)), [row * n for n in sent]], [out, [row * n for n in received]])

    def post(self, operation, x, out, sizes=None):
        if out is x:
            return posted(self.comm.Iallreduce(MPI.IN_PLACE, x), x)
        sent, received = disjoint_buffers(x, out)
        if operation == "all_gather":
            request = self.comm.Iallgatherv(sent, [received, sizes]) if sizes else self.comm.Iallgather(sent, received)
        elif sizes:
            request = self.comm.Ireduce_scatter(sent, received, sizes)
        else:
            request = self.comm.Ireduce_scatter_block(sent, received)
        return posted(request, sent, received, out)

    def post_maximum(self, x) -> Request:
        """Begin to overwrite x with the elementwise maximum over all ranks."""
        return posted(self.comm.Iallreduce(MPI.IN_PLACE, x, MPI.MAX), x)

    def post_send(self, x, to, tag):
        sent = contiguous(x)
        return posted(self.comm.Isend(ready(sent), to, tag), sent)

    def post_receive(self, x, source, tag):
        received = contiguous(x)
        return posted(self.comm.Irecv([ready(received), MPI.BYTE], source, tag), None, received, x)


def posted(request: MPI.Request, sent, received=None, x=None) -> Request:
    """Return a request of MPI's with the arrays that MPI reads and writes; `received` is x, or a buffer for it."""
    return Request(request.Test, request.Wait, partial(copy_back, received, x), sent, received)


def ready(x):
    """Return x when it can be read and overwritten: MPI knows nothing of streams, so the device has to finish first."""
    if on_device(x):
        finish_device()
    return x


def disjoint_buffers(x, out):
    """Return arrays to send x from and to receive out in, without a common element, which MPI does not allow.

    If x and out overlap, a copy stands in for the smaller one; also if that is empty, since MPI compares addresses.
    """
    if not np.may_share_memory(x, out) and min(x.size, out.size):
        return x, out
    return (x.copy(), out) if x.size < out.size else (x, np.empty_like(out))
