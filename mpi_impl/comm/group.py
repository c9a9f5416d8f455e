"""A group of ranks, as layers and optimizers see it: collectives and messages over arrays.

A group records every call, and compares it with the other ranks' calls (agreement.py); transports (`transports/`) move
the arrays. A call is written into the ledger, for a group of one rank too; into the trace, if there is one; and it has
a time limit, if the run has one.
"""
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from math import prod

import numpy as np
from mpi4py import MPI

from mpi_impl.comm.agreement import compare, require_array, require_rows
from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.instruments import Instruments
from mpi_impl.comm.ledger import name_of
from mpi_impl.comm.mpi_library import largest_tag, make_progress, start
from mpi_impl.comm.objects import ObjectGroup
from mpi_impl.comm.pending import Pending
from mpi_impl.comm.transports.choice import Transports
from mpi_impl.comm.transports.transport import AllToAll, Collectives, PointToPoint, PostedCollectives, Request
from mpi_impl.runtime.arrays import is_half, on_device


class Group(ObjectGroup):
    """Some ranks, in order, and what they can do together.

    `reason` says in the ledger what needed the call. Arrays must have the same shape and dtype on all ranks (but for
    all_to_all, the same dtype and rows of one shape). Methods raise UserError for anything but an array of numbers and,
    if `instruments` say so, for calls that do not fit together.
    """

    compares = False        # calls, before they move anything

    def __init__(self, comm: MPI.Intracomm, name: str, instruments: Instruments):
        super().__init__(comm, name, instruments)
        self.ledger, self.trace = instruments.ledger, instruments.trace
        self.transports, self.largest_tag = Transports(comm, instruments), largest_tag()
        self.compares = instruments.compare_calls and self.size > 1

    def free(self) -> None:
        """Give the communicator and what the transports hold back. All ranks call this."""
        self.transports.free()
        super().free()

    def warm_up(self, like) -> None:
        """Let NCCL, if arrays go by it from device to device, do what it does in its first call: connect ranks and load
        kernels. That may need a device on which nothing runs, and what is posted runs until other ranks have come.

        All ranks call this before anything is posted, in any group. `like` is an array of the kind that they will move.
        """
        if self.instruments.device_path.nccl is not None and self.size > 1:
            with self.watchdog.waiting(self.name, "NCCL's first call", self.others):
                self.transports.choose(Collectives, like).warm_up(like)

    # ---- collectives ----

    def all_reduce(self, x, reason: str, op: str = "sum"):
        """Overwrite x with the elementwise sum (or maximum, with op="max") over all ranks, and return it."""
        require_array(x)
        with self._collective("all_reduce", x, x.size, reason, terms=f", {op}") as transport:
            transport.all_reduce(x, op)
        return x

    def all_gather(self, x, axis: int, reason: str):
        """Return every rank's x, joined in rank order along `axis`."""
        require_array(x)
        out = self._like(x, axis, x.shape[axis] * self.size)
        with self._collective("all_gather", x, out.size, reason, terms=f", axis {axis % x.ndim}") as transport:
            transport.all_gather(x, out, axis)
        return out

    def reduce_scatter(self, x, axis: int, reason: str):
        """Return this rank's piece, along `axis`, of the sum over all ranks. The axis must divide by their number."""
        require_array(x)
        out = self._like(x, axis, x.shape[axis] // self.size)
        with self._collective("reduce_scatter", x, x.size, reason, terms=f", axis {axis % x.ndim}") as transport:
            assert x.shape[axis] % self.size == 0, f"{x.shape[axis]} rows cannot be divided among {self.size} ranks"
            transport.reduce_scatter(x, out, axis)
        return out

    def broadcast(self, x, reason: str, root: int = 0):
        """Overwrite x with that of rank `root`, and return it."""
        require_array(x)
        with self._collective("broadcast", x, x.size, reason, root, terms=f", root {root}") as transport:
            assert 0 <= root < self.size, f"the root is rank {root}, but the group has {self.size} ranks, from 0 on"
            transport.broadcast(x, root)
        return x

    def all_to_all(self, xs: list, reason: str) -> list:
        """Return what each rank has for this one, in rank order: xs[i] goes to rank i. All have one shape."""
        for x in xs:
            require_array(x)
        out = [x if i == self.rank else np.empty_like(x, order="C") for i, x in enumerate(xs)]
        others = [i for i in range(self.size) if i != self.rank]
        with self._collective("all_to_all", xs[0], sum(x.size for x in xs), reason):
            assert [x.shape for x in xs] == [xs[0].shape] * self.size, "each rank gets an array, all of one shape"
            transport = self.transports.choose(PointToPoint, xs[0])
            requests = [transport.post_receive(out[i], i, 0) for i in others]
            requests += [transport.post_send(xs[i], i, 0) for i in others]
            for request in requests:
                request.wait()
        return out

    def all_to_all_rows(self, x, sent: Sequence[int], received: Sequence[int], reason: str):
        """Send sent[i] rows of x to rank i, one rank's after the other's; return received[i] rows of each, in order.

        Only the rows for other ranks are recorded: another number on each.
        """
        require_array(x)
        out = np.empty_like(x, order="C", shape=(sum(received), *x.shape[1:]))
        elements = (len(x) - sent[self.rank]) * prod(x.shape[1:])
        with self._collective("all_to_all_rows", x, elements, reason, kind=AllToAll) as transport:
            if self.compares:
                require_rows(self, sent, received)
            transport.all_to_all_rows(x, sent, out, received)
        return out

    def _like(self, x, axis: int, length: int):
        """Return an array for a result: like x, but for its length along the axis. A rank alone gets x itself."""
        if self.size == 1:
            return x
        axis %= x.ndim
        return np.empty_like(x, order="C", shape=(*x.shape[:axis], length, *x.shape[axis + 1:]))

    # ---- calls that are posted now and waited for later ----

    def post_send(self, x, to: int, tag: int, reason: str) -> Pending:
        """Send x to rank `to`, which posts a receive with the same tag. x must not change until the wait is over."""
        require_array(x)
        self._record("send", x, x.size, reason, [self.ranks[self.rank], self.ranks[to]])
        with self._posting(reason, x) as clock:
            compared = self._compare("message", x, reason, to=[to], sources=[], tag=tag)
            request = self.transports.choose(PointToPoint, x).post_send(x, to, 2 * tag)
            pending = Pending(self, f"send {reason}", [*compared, request], None, [self.ranks[to]])
            if clock is not None:
                pending.stamp[0] = clock.tell()
                pending.requests.append(self.transports.mpi.post_send(pending.stamp, to, 2 * tag + 1))
        return pending

    def post_receive(self, x, source: int, tag: int, reason: str) -> Pending:
        """Receive into x what rank `source` sends with this tag. x has it once the wait is over."""
        require_array(x)
        with self._posting(reason, x) as clock:
            compared = self._compare("message", x, reason, to=[], sources=[source], tag=tag)
            request = self.transports.choose(PointToPoint, x).post_receive(x, source, 2 * tag)
            pending = Pending(self, f"receive {reason}", [*compared, request], x, [self.ranks[source]])
            if clock is not None:
                pending.takes = clock.link.seconds("send", 2, x.nbytes)
                pending.requests.append(self.transports.mpi.post_receive(pending.stamp, source, 2 * tag + 1))
        return pending

    def post_all_reduce(self, x, reason: str) -> Pending:
        """Begin the elementwise sum over all ranks, which post in the same order. x has it once the wait is over."""
        require_array(x)
        return self._post("all_reduce", x, x, None, reason)

    def post_all_gather(self, x, out, reason: str, sizes: Sequence[int] | None = None) -> Pending:
        """Begin to join every rank's x [n] in out [n * size], in rank order. x may be this rank's own part of out.

        Both belong to the call until the wait is over; `wait` returns out. All ranks post in the same order. With
        `sizes` rank i has sizes[i] elements, none or all of out included.
        """
        self._check_parts(out, x, sizes)
        return self._post("all_gather", x, out, sizes, reason)

    def post_reduce_scatter(self, x, out, reason: str, sizes: Sequence[int] | None = None) -> Pending:
        """Begin the elementwise sum over all ranks of x [n * size]: rank i gets its i-th n elements in out [n].

        x must stay as it is until the wait is over, which returns out; out may be this rank's own part of x, which is
        the sum from then on. All ranks post in the same order. With `sizes` rank i gets sizes[i] elements.
        """
        self._check_parts(x, out, sizes)
        return self._post("reduce_scatter", x, out, sizes, reason)

    def progress(self) -> None:
        """Progress all operations that this rank has posted: for long computations that do not call MPI."""
        self.trace.clock.pause()        # it takes no time of its own
        make_progress()
        self.trace.clock.resume()

    def _check_parts(self, whole, part, sizes) -> None:
        """Assert that parts of these sizes, or as large as this one, make up the whole, and that this rank's fits."""
        require_array(whole)
        require_array(part)
        sizes = sizes or [part.size] * self.size
        assert part.size == sizes[self.rank] and whole.size == sum(sizes), (
            f"{whole.size} elements are not {' + '.join(map(str, sizes))}, of which rank {self.rank} has {part.size}")

    def _post(self, operation, x, out, sizes, reason):
        assert x.dtype == out.dtype, f"{x.dtype} cannot become {out.dtype} on the way"      # MPI would not notice
        assert operation == "all_gather" or not is_half(x), f"{x.dtype} is added up by blocking calls only"
        whole = x if x.size > out.size else out
        self._record(operation, whole, whole.size, reason, self.ranks)
        terms = f", sizes {list(sizes)}" if sizes else ""
        with self._posting(reason, x) as clock:
            compared = self._compare(f"post_{operation}", whole, reason, terms)
            request = self.transports.choose(PostedCollectives, x).post(operation, x, out, sizes)
            pending = Pending(self, reason, [*compared, request], out, self.others)
            if clock is not None:
                pending.stamp[0] = clock.tell()
                pending.takes = clock.link.seconds(operation, self.size, whole.nbytes)
                pending.requests.append(self.transports.mpi.post_maximum(pending.stamp))
        return pending

    # ---- the instruments ----

    @contextmanager
    def _collective(self, operation, x, elements, reason, root=0, kind=Collectives, terms=""):
        """Record a collective, and yield the transport that moves x. It is over when the last rank has come.

        (With NCCL it is then on the device's stream, and no more: a trace shows when that was.)
        """
        self._record(operation, x, elements, reason, self.ranks, root)
        with self._waiting(reason, self.others) as clock:
            for request in self._compare(operation, x[:0] if kind is AllToAll else x, reason, terms):
                request.wait()
            if clock is None:
                yield self.transports.choose(kind, x)
                return
            latest = np.array([clock.tell()])
            self.transports.mpi.all_reduce(latest, "max")
            yield self.transports.choose(kind, x)
            clock.reach(latest[0] + clock.link.seconds(operation, self.size, elements * x.dtype.itemsize))

    @contextmanager
    def _waiting(self, reason, ranks):
        """Watch a wait for other ranks, and yield the virtual clock, if there is one.

        A rank alone waits for nobody, but helps on what other groups have posted.
        """
        if self.size == 1:
            self.progress()
            yield None
            return
        with self.trace.slice("communication", reason, "communication"), \
                self.watchdog.waiting(self.name, reason, ranks):
            self.trace.clock.pause()
            yield self._virtual_clock()
            self.trace.clock.resume()

    @contextmanager
    def _posting(self, reason="", x=None):
        """Stop the clock, since posting takes no time of its own, and yield the virtual clock, if there is one.

        A device may have to wait for other ranks, by NCCL, before x can be read: that has a limit.
        """
        self.trace.clock.pause()
        limited = x is not None and on_device(x)
        with self.watchdog.waiting(self.name, reason, self.others) if limited else nullcontext():
            yield self._virtual_clock()
        self.trace.clock.resume()

    def _compare(self, operation, x, reason, terms="", **peers) -> list[Request]:
        """Begin to compare a call with the calls of its peers, by default all other ranks."""
        call = self.compares and f"{operation}({name_of(x.dtype)} {list(x.shape)}{terms})"
        return [compare(self, call, reason, **peers)] if call else []

    def _record(self, operation, x, elements, reason, ranks, root=0):
        """Write a call between these ranks of the world into the ledger, and how much of it crosses between hosts."""
        self.ledger.record(operation, self.name, self.size, reason, elements, x.dtype,
                           self.instruments.hosts.crossing(operation, ranks, root))

    def _virtual_clock(self) -> VirtualClock | None:
        """Return the clock, if ranks must tell one another what time it is; a rank alone need not."""
        clock = self.trace.clock
        return clock if isinstance(clock, VirtualClock) and self.size > 1 else None


def world(instruments: Instruments | None = None) -> Group:
    """Return the group of all ranks that were started together."""
    start()
    return Group(MPI.COMM_WORLD, "world", instruments or Instruments())
