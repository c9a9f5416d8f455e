"""A group of ranks and its collectives. The only file of the project that calls MPI.

Arrays may live on the host (NumPy) or on a device (CuPy): a device array is staged through host memory, by copies
that are asked for and not hidden. Every collective over arrays is written into the ledger, a group of one rank's too.
"""
import time

import numpy as np
from mpi4py import MPI

from mpi_impl.comm.ledger import Ledger
from reference.errors import UserError


class Group:
    """Some ranks, in order, and what they can do together.

    `reason` says in the ledger what needed the collective. Arrays must have the same shape and dtype on all ranks.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, ledger: Ledger):
        self.comm, self.name, self.ledger = comm, name, ledger
        self.size, self.rank = comm.size, comm.rank

    def all_reduce(self, x, reason: str, op: str = "sum"):
        """The elementwise sum (or maximum, with op="max") over all ranks. Overwrites x and returns it."""
        self._record("all_reduce", x.size, x.dtype, reason)
        if self.size > 1:
            buffer = to_host(x)
            self.comm.Allreduce(MPI.IN_PLACE, buffer, {"sum": MPI.SUM, "max": MPI.MAX}[op])
            copy_back(buffer, x)
        return x

    def all_gather(self, x, axis: int, reason: str):
        """Every rank's x, joined in rank order along `axis`."""
        self._record("all_gather", x.size * self.size, x.dtype, reason)
        if self.size == 1:
            return x
        send = to_host(x)
        parts = np.empty((self.size, *send.shape), send.dtype)
        self.comm.Allgather(send, parts)
        return like(np.concatenate(list(parts), axis), x)

    def reduce_scatter(self, x, axis: int, reason: str):
        """This rank's piece, along `axis`, of the sum over all ranks. The axis must divide by the group's size."""
        self._record("reduce_scatter", x.size, x.dtype, reason)
        if self.size == 1:
            return x
        pieces = np.ascontiguousarray(np.split(to_host(x), self.size, axis))
        mine = np.empty_like(pieces[0])
        self.comm.Reduce_scatter_block(pieces, mine, MPI.SUM)
        return like(mine, x)

    def broadcast(self, x, reason: str, root: int = 0):
        """Rank `root`'s x, on every rank. Overwrites x and returns it."""
        self._record("broadcast", x.size, x.dtype, reason)
        if self.size > 1:
            buffer = to_host(x)
            self.comm.Bcast(buffer, root)
            copy_back(buffer, x)
        return x

    def from_first(self, make):
        """`make()` of the group's first rank, on every rank: any picklable object, or the UserError it raised.

        For what only one rank should do (read a file, train a tokenizer) and all must agree on, failure included.
        Such objects are small, and are not in the ledger.
        """
        outcome = None
        if self.rank == 0:
            try:
                outcome = make()
            except UserError as error:
                outcome = error
        outcome = self.comm.bcast(outcome)
        if isinstance(outcome, UserError):
            raise outcome
        return outcome

    def part(self, color: int, name: str) -> "Group":
        """The ranks of this group that give the same color, in this group's order. Called by all of them."""
        return Group(MPI.Intracomm(self.comm.Split(color, self.rank)), name, self.ledger)

    def first(self, n: int) -> "Group":
        """The first n ranks. Called by those ranks alone."""
        return Group(self.comm.Create_group(self.comm.group.Incl(range(n))), self.name, self.ledger)

    def free(self) -> None:
        """Give the communicator back to MPI, which has only a few thousand."""
        self.comm.Free()

    def everyone_arrives(self, seconds: float) -> bool:
        """A barrier with a time limit: whether all ranks got here."""
        request, deadline = self.comm.Ibarrier(), time.monotonic() + seconds
        while not request.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _record(self, operation, elements, dtype, reason):
        self.ledger.record(operation, self.name, self.size, reason, elements, dtype)


def world(ledger: Ledger | None = None) -> Group:
    """All ranks that were started together."""
    return Group(MPI.COMM_WORLD, "world", ledger or Ledger())


def abort(status: int) -> None:
    """End every rank of the world now, with this exit status."""
    MPI.COMM_WORLD.Abort(status)


def library() -> str:
    """The MPI in use, as 'MPICH 5.0.2'."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def on_device(x) -> bool:
    return not isinstance(x, np.ndarray)


def to_host(x):
    """A contiguous host array with x's elements: x itself if it is one."""
    return np.ascontiguousarray(x.get() if on_device(x) else x)


def copy_back(buffer, x) -> None:
    """Give x the elements of the host array that stood in for it."""
    if buffer is not x:
        x[...] = like(buffer, x)


def like(host, x):
    """A host array, moved to where x lives."""
    return np.asarray(host, like=x) if on_device(x) else host
