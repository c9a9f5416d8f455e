"""Collectives of arrays on devices by NCCL. The only file that calls NCCL.

NCCL does not know the host: a call puts work on a stream, and returns. The work begins when everything before it on
that stream is done, so code that stays on one stream need not wait for anything. *Posted* collectives go on a second
stream, overlapped with the computation; events say there when they may begin, and on the first stream when they are
over.

Two collectives, of two groups, may then be on a device at the same time. NCCL promises that only for kernels that fit
there side by side, as Megatron's do, too, and wants all ranks to launch them in the same order, as they do here.

NCCL adds up 16-bit floats in their own format: rounded at every hop from rank to rank, not once.

From 2.30 on it lets ranks share a GPU, if it is told to. A call's kernel holds its thread blocks until the other ranks'
kernels have come. If those found no room on the same GPU, all would wait for ever, so each gets few.
"""
import os
from functools import cached_property
from typing import Any

import numpy as np

from mpi_impl.comm.transports.buffers import copy_back, join_pieces, room_for_pieces, split_in_pieces
from mpi_impl.comm.transports.transport import Collectives, PostedCollectives, Request
from mpi_impl.runtime.arrays import contiguous

SHARES_GPUS = 23000     # the first version that lets ranks share one, 2.30.0
AT_ONCE = 2             # calls of a rank that may be on the GPU at the same time: one on each stream
MOST_BLOCKS = 8         # of a call, which two ranks could otherwise share among 16


def blocks_of_a_call(multiprocessors: int, ranks: int) -> int:
    """Return the thread blocks that a call may take where this many ranks share a GPU: those of all calls that may be
    there together have half of it. 0 says that these are too many ranks.
    """
    return min(MOST_BLOCKS, multiprocessors // (2 * AT_ONCE * ranks))


def most_ranks(multiprocessors: int) -> int:
    """Return how many ranks can share a GPU."""
    return multiprocessors // (2 * AT_ONCE)


class NCCL:
    """The library, for a rank that has chosen its GPU, and the stream for posted collectives of all its groups."""

    def __init__(self, blocks: int | None = None):
        """Load the library. `blocks` are the thread blocks of a call where ranks share a GPU, else None.

        NCCL reads its settings when it makes the first communicator. What the user has set stays.
        """
        import cupy
        from cupy.cuda import nccl
        settings = {"NCCL_RUNTIME_CONNECT": "0"}                # connect all ranks when a communicator is made
        if blocks is not None:
            settings |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": str(blocks), "NCCL_NVLS_ENABLE": "0"}
        os.environ.update(settings | os.environ)
        self.cuda: Any = cupy.cuda
        self.library: Any = nccl
        self.side = cupy.cuda.Stream(non_blocking=True)

    def mark(self, stream):
        """Record an event: everything on this stream until now is done."""
        return stream.record(self.cuda.Event(disable_timing=True))


class NcclTransport(Collectives, PostedCollectives):
    """NCCL for one group. NCCL needs contiguous arrays.

    CuPy gives memory that nobody holds any more to the next allocation on the stream on which it was made, the first
    one. So a request holds the posted array until that stream has been made to wait.
    """

    def __init__(self, nccl: NCCL, comm):
        self.nccl, self.library, self.mpi_comm = nccl, nccl.library, comm
        self.rank, self.size = comm.rank, comm.size

    @cached_property
    def comm(self):
        """Return NCCL's communicator. All ranks wait for one another when they first need it."""
        name = self.mpi_comm.bcast(self.library.get_unique_id() if self.rank == 0 else None)
        return self.library.NcclCommunicator(self.size, name, self.rank)

    def warm_up(self, like) -> None:
        """Make the communicator, and wait for a first sum of arrays of this kind."""
        self.all_reduce(np.zeros_like(like, shape=1), "sum")
        self._current().synchronize()

    # ---- on the current stream: what follows finds the result ----

    def all_reduce(self, x, op):
        buffer = contiguous(x)
        self._all_reduce(buffer, buffer, self._current(), op)
        copy_back(buffer, x)

    def all_gather(self, x, out, axis):
        pieces = room_for_pieces(out, self.size, axis)
        self._all_gather(contiguous(x), pieces, self._current())
        join_pieces(pieces, out, axis)

    def reduce_scatter(self, x, out, axis):
        self._reduce_scatter(split_in_pieces(x, self.size, axis), out, self._current())

    def broadcast(self, x, root):
        buffer = contiguous(x)
        if x.size:
            place = address(buffer)
            self.comm.broadcast(place, place, x.size, self._code(x), root, self._current().ptr)
        copy_back(buffer, x)

    # ---- on the second one ----

    def post(self, operation, x, out, sizes=None):
        begin = {"all_reduce": self._all_reduce, "all_gather": self._all_gather,
                 "reduce_scatter": self._reduce_scatter}[operation]
        side = self.nccl.side
        side.wait_event(self.nccl.mark(self._current()))     # x may still be computed, and out be read
        if sizes:
            self._by_owners(operation, x, out, sizes, side)
        else:
            begin(x, out, side)
        end = self.nccl.mark(side)
        recorded = self._current().is_capturing()               # and then nothing runs, nor may it be asked about
        # The device waits, not we.
        return Request(lambda: not recorded and end.done, lambda: self._current().wait_event(end), None, x)

    # ---- NCCL's own calls: addresses, elements, codes ----

    def _all_reduce(self, x, out, stream, op="sum"):
        if x.size:
            self.comm.allReduce(address(x), address(out), x.size, self._code(x), self._op(op), stream.ptr)

    def _all_gather(self, x, out, stream):
        if x.size:
            self.comm.allGather(address(x), address(out), x.size, self._code(x), stream.ptr)

    def _reduce_scatter(self, x, out, stream):
        if out.size:
            self.comm.reduceScatter(address(x), address(out), out.size, self._code(x), self._op("sum"), stream.ptr)

    def _by_owners(self, operation, x, out, sizes, stream):
        """Gather pieces of several sizes, or sum and scatter them: a call for each rank's, which go as one."""
        whole = out if operation == "all_gather" else x
        self.library.groupStart()
        for root, piece in enumerate(np.split(whole, np.cumsum(sizes)[:-1].tolist())):
            if piece.size and operation == "all_gather":
                self.comm.broadcast(address(x if root == self.rank else piece), address(piece), piece.size,
                                    self._code(x), root, stream.ptr)
            elif piece.size:
                self.comm.reduce(address(piece), address(out if root == self.rank else piece), piece.size,
                                 self._code(x), self._op("sum"), root, stream.ptr)
        self.library.groupEnd()

    def _code(self, x) -> int:
        return getattr(self.library, f"NCCL_{x.dtype.name.upper()}")     # bfloat16's, too

    def _op(self, op: str) -> int:
        return getattr(self.library, f"NCCL_{op.upper()}")

    def _current(self):
        return self.nccl.cuda.get_current_stream()

    def free(self):
        if "comm" in vars(self):
            self._current().synchronize()
            self.nccl.side.synchronize()
            self.comm.destroy()
            del self.comm


def address(x) -> int:
    """Return the address of a contiguous array's first element."""
    assert x.flags.c_contiguous, "NCCL takes the elements as they lie in memory"
    return x.data.ptr
