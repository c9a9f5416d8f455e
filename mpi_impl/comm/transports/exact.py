"""Exact numbers (reference/exact/) between ranks: pickled, since MPI knows neither their format nor their sum."""
from functools import reduce
from itertools import count
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_impl.comm.mpi_library import largest_tag
from mpi_impl.comm.transports.transport import AllToAll, Collectives, PointToPoint, PostedCollectives, Request
from reference.exact.array import ExactArray

OPERATIONS = {"sum": np.add, "max": np.maximum}


class ExactTransport(Collectives, AllToAll, PointToPoint, PostedCollectives):
    """Collectives in which each rank gets all arrays, and adds them up itself: they are small."""

    def __init__(self, comm: MPI.Intracomm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.posts = count()       # numbers background collectives; every rank counts in the same order

    def takes(self, x):
        return isinstance(x, ExactArray)

    def all_reduce(self, x, op):
        fill(x, reduce(OPERATIONS[op], self.comm.allgather(x)))

    def all_gather(self, x, out, axis):
        fill(out, np.concatenate(self.comm.allgather(x), axis))

    def reduce_scatter(self, x, out, axis):
        fill(out, np.split(reduce(np.add, self.comm.allgather(x)), self.size, axis)[self.rank])

    def broadcast(self, x, root):
        fill(x, self.comm.bcast(x, root))

    def all_to_all_rows(self, x, sent, out, received):
        fill(out, np.concatenate(self.comm.alltoall(np.split(x, np.cumsum(sent)[:-1]))))

    def post(self, operation, x, out, sizes=None):
        tag = self.collective_tag()
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self.comm.isend(x, rank, tag) for rank in others]
        receives = {rank: IncomingMessage(self.comm, rank, tag) for rank in others}

        def finish():
            xs = [x if rank == self.rank else receives[rank].x for rank in range(self.size)]
            if operation == "all_gather":
                fill(out, np.concatenate(xs))
            else:
                total, ends = reduce(np.add, xs), np.cumsum(sizes)[:-1] if sizes else self.size
                fill(out, total if operation == "all_reduce" else np.split(total, ends)[self.rank])

        return together([*receives.values(), *sends], finish)

    def collective_tag(self) -> int:
        """Return a tag for a collective, counted down from the largest. Messages have small ones."""
        return 2 * (largest_tag() - next(self.posts) % 10_000)

    def post_send(self, x, to, tag):
        return together([self.comm.isend(x, to, tag)], None)

    def post_receive(self, x, source, tag):
        message = IncomingMessage(self.comm, source, tag)
        return together([message], lambda: fill(x, message.x))


class IncomingMessage:
    """A message on its way, with the methods of mpi4py's requests."""

    def __init__(self, comm, source: int, tag: int):
        self.comm, self.source, self.tag = comm, source, tag
        self.x: Any = None

    def Test(self) -> bool:
        if self.x is None and (message := self.comm.improbe(self.source, self.tag)) is not None:
            self.x = message.recv()
        return self.x is not None

    def Wait(self) -> None:
        if self.x is None:
            self.x = self.comm.recv(source=self.source, tag=self.tag)


def fill(out, x) -> None:
    """Overwrite out with x, of the same shape: NumPy would stretch a smaller array, and MPI does not."""
    assert x.shape == out.shape, f"an array of shape {x.shape} came where one of shape {out.shape} was expected"
    out[...] = x


def together(requests, finish) -> Request:
    """Return the request that is over when all of these are."""
    return Request(lambda: all([request.Test() for request in requests]),
                   lambda: [request.Wait() for request in requests], finish)
