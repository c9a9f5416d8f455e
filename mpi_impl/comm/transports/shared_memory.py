"""Collectives of ranks on one machine, through memory that all of them can read and write.

MPI hands an array over in pieces, from rank to rank, and each piece is a wait for another process: where there are more
ranks than cores, a wait for its turn. Here every rank lays its array down where all can see it; then each adds up one
part of all of them; then everyone takes the whole sum. That is two waits for all others, and no message. Two ranks, and
those with small arrays, each add up everything, and save a wait. A sum is in rank order, whichever rank adds it up.
"""
import os
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpi_impl.comm.mpi_library import attribute_key, place_on_machine
from mpi_impl.comm.transports.buffers import copy_back
from mpi_impl.comm.transports.transport import Collectives
from mpi_impl.kernels import sum_in_rank_order
from mpi_impl.runtime.arrays import contiguous
from mpi_impl.runtime.rank_environment import cores, forget_shared_memory, ranks_here, shared_memory_left

# Bytes: a step's few numbers go by MPI, and no memory is shared for their sake. Where there are more ranks than cores,
# shared memory is several times as fast at every size; elsewhere MPI is faster below 16 KiB, by some microseconds.
SMALL = 256
CAPACITY = 1 << 20      # bytes of an array that are handed over at the same time
ROOM = 24 << 20         # bytes for each rank on this machine: more than all groups of a run can take
LITTLE = 1 << 16        # bytes of all ranks' arrays that each rank adds up itself: it saves a wait
LINE = 64               # bytes of a cache line: each rank's count of its arrivals has one to itself
PATIENCE = 2000         # looks at a count, giving the core away after each, before a rank goes to sleep;
CROWDED_PATIENCE = 20   # and where there are more ranks than cores, and others could use the core
NAP = 5e-5              # seconds


class SharedMemoryTransport(Collectives):
    """Collectives of arrays that are not tiny, if all ranks are on one machine that has room for them."""

    def __init__(self, comm: MPI.Intracomm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    @cached_property
    def board(self) -> "Board":
        """Return the memory, which all ranks open together at the first need. Groups of one communicator share it."""
        found: Any = self.comm.Get_attr(attribute_key("shared memory"))
        if found is None:
            found = open_board(self.comm)
            self.comm.Set_attr(attribute_key("shared memory"), found)
        return found[0]

    def takes(self, x):
        return x.nbytes >= SMALL and self.board is not None

    def all_reduce(self, x, op):
        buffer = contiguous(x)
        flat = buffer.reshape(-1)
        for where in rows(flat, CAPACITY):
            piece = flat[where]
            n = len(piece)
            offered, result = self.board.area(x.dtype, n)
            offered[self.rank] = piece
            self.board.barrier()
            if self.size == 2 or offered.nbytes <= LITTLE:
                sum_in_rank_order(offered, op, piece)
                continue
            mine = slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)
            sum_in_rank_order(offered[:, mine], op, result[mine])
            self.board.barrier()
            piece[...] = result
        copy_back(buffer, x)

    def all_gather(self, x, out, axis):
        parts = np.split(out, self.size, axis)
        for where in rows(x, CAPACITY):
            piece = x[where]
            offered, _ = self.board.area(x.dtype, piece.size)
            offered[self.rank].reshape(piece.shape)[...] = piece
            self.board.barrier()
            for part, theirs in zip(parts, offered, strict=True):
                part[where] = theirs.reshape(piece.shape)

    def reduce_scatter(self, x, out, axis):
        parts = np.split(x, self.size, axis)
        for where in rows(out, CAPACITY // self.size):
            shape = self.size, *out[where].shape
            offered, _ = self.board.area(out.dtype, prod(shape))
            for place, part in zip(offered[self.rank].reshape(shape), parts, strict=True):
                place[...] = part[where]
            self.board.barrier()
            sum_in_rank_order(offered.reshape(self.size, *shape)[:, self.rank], "sum", out[where])

    def broadcast(self, x, root):
        for where in rows(x, CAPACITY):
            piece = x[where]
            _, result = self.board.area(x.dtype, piece.size)
            if self.rank == root:
                result.reshape(piece.shape)[...] = piece
            self.board.barrier()
            if self.rank != root:
                piece[...] = result.reshape(piece.shape)

    def free(self):
        found: Any = self.comm.Get_attr(attribute_key("shared memory"))
        if found and found[1]:
            _, window = found
            window.Unlock_all()
            window.Free()


class Board:
    """One rank's view of the memory: a count of arrivals for each rank, and two areas that are used by turns.

    An area has room for each rank's array and for the result. A rank that is slow to read one area is not disturbed by
    those that are ahead, which write the other: and before they come back to the first, all have passed a barrier.
    """

    def __init__(self, memory: np.ndarray, rank: int, size: int, fence: Callable, progress: Callable):
        """Lay the board out in `memory`: uint8 [bytes_for(size)], zeros, and the same on all ranks. `fence()` returns
        when what this rank has written can be seen by others, and the other way round; `progress()` is called
        repeatedly in waits.
        """
        counts, areas = np.split(memory, [size * LINE])
        self.counts = [counts[i * LINE:i * LINE + 8].view(np.int64) for i in range(size)]
        self.areas = areas.reshape(2, size + 1, CAPACITY)
        self.rank, self.fence, self.progress = rank, fence, progress
        self.patience = PATIENCE if ranks_here() <= cores() else CROWDED_PATIENCE
        self.barriers = 0       # that this rank has come to
        self.turn = 0           # which area is in use

    def area(self, dtype: np.dtype, n: int):
        """Return the next area: views of each rank's place [size, n], and of the result's [n]."""
        self.turn = 1 - self.turn
        views = self.areas[self.turn, :, :n * dtype.itemsize].view(dtype)
        return views[:-1], views[-1]

    def barrier(self) -> None:
        """Wait until every rank has come here as often as this one."""
        self.barriers += 1
        self.fence()
        self.counts[self.rank][0] = self.barriers
        for count in self.counts:
            looks = 0
            while count[0] < self.barriers:
                self.progress()
                looks += 1
                if looks < self.patience:
                    os.sched_yield()
                else:
                    time.sleep(NAP)
        self.fence()


def open_board(comm: MPI.Intracomm) -> tuple[Board | None, MPI.Win | None]:
    """Return the board and the window of MPI's that it lies in. All ranks call this.

    Return two None if ranks are on several machines, or the system has little shared memory: a process that runs out
    of it is killed.
    """
    _, here = place_on_machine(comm)
    room = comm.bcast(shared_memory_left() >= ROOM * ranks_here())      # identical on all ranks
    if here < comm.size or not room:
        return None, None
    window = MPI.Win.Allocate_shared(bytes_for(comm.size) if comm.rank == 0 else 0, comm=comm)
    window.Lock_all()           # for good: the board sees to who may write where
    memory = np.frombuffer(cast(Any, window.Shared_query(0)[0]), np.uint8)
    if comm.rank == 0:
        memory[:comm.size * LINE] = 0       # the counts: MPI promises nothing
    window.Sync()
    comm.Barrier()
    window.Sync()
    forget_shared_memory()
    return Board(memory, comm.rank, comm.size, window.Sync, comm.Iprobe), window


def bytes_for(size: int) -> int:
    """Return the bytes of a board for this number of ranks."""
    return size * LINE + 2 * (size + 1) * CAPACITY


def rows(x: np.ndarray, capacity: int, *above: int) -> Iterator[tuple]:
    """Yield indices that divide x into pieces of at most `capacity` bytes: some rows each, or parts of a row."""
    row = x.nbytes // max(len(x), 1)
    if row > capacity:
        for i in range(len(x)):
            yield from rows(x[i], capacity, *above, i)
    else:
        step = capacity // max(row, 1)
        for start in range(0, len(x) if row else 0, step):
            yield *above, slice(start, start + step)
