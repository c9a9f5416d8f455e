"""Collectives of ranks on one machine, through memory that all of them can read and write.

MPI hands an array over in pieces, from rank to rank, and each piece is a wait for another process: where there are more
ranks than cores, a wait for its turn. Here every rank lays its array down where all can see it; then each adds up one
part of all of them; then everyone takes the whole sum. That is two waits for all others, and no message. A sum is in
rank order, whoever adds it up.

Nothing here calls MPI: group.py makes the memory, and says how to help MPI along while a rank waits.
"""
import os
import time
from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np

CAPACITY = 1 << 20      # bytes of an array that are handed over at once
LINE = 64               # bytes of a cache line: each rank's count of its arrivals has one to itself
PATIENCE = 2000         # looks at a count, giving the core away after each, before a rank goes to sleep
NAP = 5e-5              # seconds


class SharedMemory:
    """One rank's view of it: a count of arrivals for each rank, and two areas that are used by turns.

    An area has room for each rank's array and for the result. A rank that is slow to read the one area is not disturbed
    by those that are ahead, which write the other: and before they come back to the first, all have met.
    """

    def __init__(self, memory: np.ndarray, rank: int, size: int, fence: Callable, progress: Callable):
        """`memory`: uint8 [bytes_for(size)], zeros, and the same on all ranks. `fence()` returns when what this rank
        has written can be seen by others, and the other way round; `progress()` is called again and again in waits.
        """
        counts, areas = np.split(memory, [size * LINE])
        self.counts = [counts[i * LINE:i * LINE + 8].view(np.int64) for i in range(size)]
        self.areas = areas.reshape(2, size + 1, CAPACITY)
        self.rank, self.size, self.fence, self.progress = rank, size, fence, progress
        self.met = 0            # times that all ranks have met
        self.turn = 0           # which area is in use

    def all_reduce(self, x: np.ndarray, add_up: Callable) -> None:
        """Overwrite x, contiguous, with what `add_up` makes of all ranks' arrays [size, n] -> [n]."""
        flat = x.reshape(-1)
        for where in self.rows(flat, CAPACITY):
            piece = flat[where]
            n = len(piece)
            offered, result = self.area(x.dtype, n)
            offered[self.rank] = piece
            self.barrier()
            mine = slice(self.rank * n // self.size, (self.rank + 1) * n // self.size)
            result[mine] = add_up(offered[:, mine])
            self.barrier()
            piece[...] = result

    def all_gather(self, x: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Every rank's x, into out: an array like x for each rank, as it may be parts of a whole."""
        for where in self.rows(x, CAPACITY):
            piece = x[where]
            offered, _ = self.area(x.dtype, piece.size)
            offered[self.rank].reshape(piece.shape)[...] = piece
            self.barrier()
            for part, theirs in zip(out, offered, strict=True):
                part[where] = theirs.reshape(piece.shape)

    def reduce_scatter(self, parts: Sequence[np.ndarray], out: np.ndarray, add_up: Callable) -> None:
        """Of what `add_up` makes of all ranks' parts, each a list with an array for each rank, those for this rank."""
        for where in self.rows(out, CAPACITY // self.size):
            shape = self.size, *out[where].shape
            offered, _ = self.area(out.dtype, prod(shape))
            for place, part in zip(offered[self.rank].reshape(shape), parts, strict=True):
                place[...] = part[where]
            self.barrier()
            out[where] = add_up(offered.reshape(self.size, *shape)[:, self.rank])

    def rows(self, x: np.ndarray, capacity: int, *above: int) -> Iterator[tuple]:
        """Indices that cut x into pieces of at most so many bytes: some rows each, or parts of a row."""
        row = x.nbytes // max(len(x), 1)
        if row > capacity:
            for i in range(len(x)):
                yield from self.rows(x[i], capacity, *above, i)
        else:
            step = capacity // max(row, 1)
            for start in range(0, len(x) if row else 0, step):
                yield *above, slice(start, start + step)

    def area(self, dtype: np.dtype, n: int):
        """The next one: views of each rank's place [size, n], and of the result's [n]."""
        self.turn = 1 - self.turn
        views = self.areas[self.turn, :, :n * dtype.itemsize].view(dtype)
        return views[:-1], views[-1]

    def barrier(self) -> None:
        """Wait until every rank has come here as often as this one."""
        self.met += 1
        self.fence()
        self.counts[self.rank][0] = self.met
        for count in self.counts:
            looks = 0
            while count[0] < self.met:
                self.progress()
                looks += 1
                if looks < PATIENCE:
                    os.sched_yield()
                else:
                    time.sleep(NAP)
        self.fence()


def bytes_for(size: int) -> int:
    """That ranks of this number need."""
    return size * LINE + 2 * (size + 1) * CAPACITY
