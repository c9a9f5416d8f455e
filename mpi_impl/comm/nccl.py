"""Collectives of arrays on devices by NCCL, where each rank has a GPU of its own. The only file that calls it.

NCCL does not know the host: a call puts work on a stream, and returns. What was told on that stream before is done
before it, and what is told later after it, so whoever stays on one stream need not wait for anything. What is *posted*
goes on a second stream, beside what is computed; events say there when it may begin, and on the first when it is over.

Two collectives may then be on a device at once, of two groups. NCCL promises that for none but those that fit there
beside each other, as they do in Megatron, too, and wants all ranks to tell them in the same order, as they do here.

NCCL adds up halves by itself, in their own format: rounded at every hop from rank to rank, not once.
"""
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np


class NCCL:
    """A rank's, once it has chosen its GPU: with the stream for what is posted, which all of its groups share."""

    def __init__(self):
        import cupy
        from cupy.cuda import nccl
        self.cuda: Any = cupy.cuda
        self.library: Any = nccl
        self.side = cupy.cuda.Stream(non_blocking=True)

    def mark(self, stream):
        """An event: what has been told on this stream until now is done."""
        return stream.record(self.cuda.Event(disable_timing=True))


class Communicator:
    """A group's. Arrays are on this rank's device, and alike in shape and dtype on all ranks.

    CuPy gives memory that nobody holds any more to whoever wants some next, on the stream on which it was made: the
    first. So who posts an array holds it until that stream has been told to wait.
    """

    def __init__(self, nccl: NCCL, rank: int, size: int, broadcast_object: Callable):
        """`broadcast_object(value)` is the first rank's value, on every rank. Called by all of them: they wait here
        for one another.
        """
        self.nccl, self.rank, self.size, self.library = nccl, rank, size, nccl.library
        name = broadcast_object(self.library.get_unique_id() if rank == 0 else None)
        self.comm = self.library.NcclCommunicator(size, name, rank)

    # ---- on the current stream: what follows finds the result ----

    def all_reduce(self, x, op: str) -> None:
        """Overwrites x."""
        buffer = together(x)
        self._all_reduce(buffer, buffer, self._current(), op)
        if buffer is not x:
            x[...] = buffer

    def all_gather(self, x, axis: int):
        theirs = np.empty_like(x, order="C", shape=(self.size, *x.shape))
        self._all_gather(together(x), theirs, self._current())
        if consecutive(x.shape, axis):
            return theirs.reshape([n * self.size if i == axis % x.ndim else n for i, n in enumerate(x.shape)])
        return np.concatenate(list(theirs), axis)

    def reduce_scatter(self, x, axis: int):
        shape = [n // self.size if i == axis % x.ndim else n for i, n in enumerate(x.shape)]
        parts = together(x)
        if not consecutive(x.shape, axis):
            parts = np.stack(np.split(parts, self.size, axis))
        mine = np.empty_like(x, order="C", shape=shape)
        self._reduce_scatter(parts, mine, self._current())
        return mine

    def broadcast(self, x, root: int) -> None:
        """Overwrites x."""
        buffer = together(x)
        if x.size:
            place = address(buffer)
            self.comm.broadcast(place, place, x.size, self._code(x), root, self._current().ptr)
        if buffer is not x:
            x[...] = buffer

    # ---- on the second one ----

    def post(self, operation: str, x, out) -> "NcclRequest":
        """Begin an all_reduce (a sum), all_gather or reduce_scatter from x to out, flat. In place, x or out is this
        rank's own part of the other, as for MPI.
        """
        begin = {"all_reduce": self._all_reduce, "all_gather": self._all_gather,
                 "reduce_scatter": self._reduce_scatter}[operation]
        side = self.nccl.side
        side.wait_event(self.nccl.mark(self._current()))     # x may still be computed, and out be read
        begin(x, out, side)
        return NcclRequest(self.nccl, self.nccl.mark(side))

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

    def _code(self, x) -> int:
        return getattr(self.library, f"NCCL_{x.dtype.name.upper()}")     # bfloat16's, too

    def _op(self, op: str) -> int:
        return getattr(self.library, f"NCCL_{op.upper()}")

    def _current(self):
        return self.nccl.cuda.get_current_stream()

    def free(self) -> None:
        """Called by all ranks. Nothing may be under way."""
        self._current().synchronize()
        self.nccl.side.synchronize()
        self.comm.destroy()


class NcclRequest:
    """A collective on the second stream."""

    def __init__(self, nccl: NCCL, end):
        """`end` is the event behind it."""
        self.cuda, self.end = nccl.cuda, end

    def done(self) -> bool:
        return self.end.done

    def join(self) -> None:
        """What is told on the current stream from now on comes after it. The host does not wait."""
        self.cuda.get_current_stream().wait_event(self.end)


def consecutive(shape, axis: int) -> bool:
    """Whether the parts along this axis of a contiguous array lie in memory one after the other."""
    return prod(shape[:axis % len(shape)]) == 1


def together(x):
    """x, or a copy of it whose elements lie together."""
    return x if x.flags.c_contiguous else x.copy()


def address(x) -> int:
    assert x.flags.c_contiguous, "NCCL takes the elements as they lie in memory"
    return x.data.ptr
