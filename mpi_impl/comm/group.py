"""A group of ranks and what they say to one another. The only file of the project that calls MPI.

Arrays may live on the host (NumPy) or on a device (CuPy). Those on a device go by NCCL (nccl.py), by MPI itself, or
staged through host memory: carriers.py has the three ways, and a run takes one. Every call over arrays is written into
the ledger, a group of one rank's too; into the trace, if there is one; and it has a time limit, if the run has.

Where all ranks of a group are on one machine, collectives over arrays that are not tiny go through memory that they
share (shared_memory.py), which MPI makes.

MPI knows no formats of two bytes: it moves their bits as integers, and adding them up is done here.
"""
import ctypes
import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpi_impl.comm.carriers import ON_HOST, Carrier, Carriers, finish
from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.hosts import Hosts
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.nccl import Communicator, NcclRequest
from mpi_impl.comm.shared_memory import LINE, SharedMemory, bytes_for
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.watchdog import Watchdog
from mpi_impl.runtime.arrays import is_half, narrowed, on_device, widened
from mpi_impl.runtime.rank_environment import forget_shared_memory, ranks_here, shared_memory_left
from reference.errors import UserError

OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX}
UFUNCS = {"sum": np.add, "max": np.maximum}
SPEAKS, ALIVE = 32_767, 32_765      # tags: every MPI allows them
ROOM = 24 << 20     # bytes of shared memory for each rank here: more than all groups of a run can take
SMALL = 2048        # bytes: below, MPI moves an array, and nothing is shared for its sake


@dataclass
class Instruments:
    """What watches a rank's communication, what carries its arrays on a device, and which ranks are where. All groups
    of a rank share them.
    """

    ledger: Ledger = field(default_factory=Ledger)
    trace: Trace = field(default_factory=Trace)
    watchdog: Watchdog = field(default_factory=Watchdog)
    carriers: Carriers = Carriers()
    hosts: Hosts = field(default_factory=Hosts)


class Group:
    """Some ranks, in order, and what they can do together.

    `reason` says in the ledger what needed the call. Arrays must have the same shape and dtype on all ranks.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, instruments: Instruments):
        self.comm, self.name, self.instruments = comm, name, instruments
        self.ledger, self.trace, self.watchdog = instruments.ledger, instruments.trace, instruments.watchdog
        self.size, self.rank = comm.size, comm.rank
        self.ranks = comm.group.Translate_ranks(None, MPI.COMM_WORLD.group)     # of its members, in the world
        self.others = [r for i, r in enumerate(self.ranks) if i != self.rank]
        self.may_share = True       # memory, where it can
        self.communicator: Communicator | None = None       # NCCL's, once it is needed
        # MPI's even tags are for arrays, odd ones for stamps. It says on the world alone how many there are.
        self.largest_tag = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) // 2 - 1

    # ---- collectives ----

    def all_reduce(self, x, reason: str, op: str = "sum"):
        """The elementwise sum (or maximum, with op="max") over all ranks. Overwrites x and returns it."""
        with self._call("all_reduce", x.size, x.dtype, reason):
            if self.size == 1:
                return x
            if nccl := self._nccl(x):
                nccl.all_reduce(x, op)
                return x
            carrier = self._carrier(x)
            buffer = carrier.to_buffer(x)
            if shared := self._shared_memory(buffer):
                shared.all_reduce(buffer, partial(sum_in_rank_order, op=op))
            elif is_half(buffer):
                self._all_reduce_halves(buffer, op)
            else:
                self.comm.Allreduce(MPI.IN_PLACE, mpi_view(buffer), OPERATIONS[op])
            carrier.copy_back(buffer, x)
            return x

    def all_gather(self, x, axis: int, reason: str):
        """Every rank's x, joined in rank order along `axis`."""
        with self._call("all_gather", x.size * self.size, x.dtype, reason):
            if self.size == 1:
                return x
            if nccl := self._nccl(x):
                return nccl.all_gather(x, axis)
            carrier = self._carrier(x)
            send = carrier.to_buffer(x)
            whole = carrier.empty([n * self.size if i == axis % x.ndim else n for i, n in enumerate(x.shape)], x)
            parts = np.split(whole, self.size, axis)
            if shared := self._shared_memory(send):
                shared.all_gather(send, parts)
            else:
                theirs = np.empty_like(send, order="C", shape=(self.size, *send.shape))
                self.comm.Allgather(mpi_view(send), mpi_view(theirs))
                for part, one in zip(parts, theirs, strict=True):
                    part[...] = one
            return carrier.take(whole, x)

    def reduce_scatter(self, x, axis: int, reason: str):
        """This rank's piece, along `axis`, of the sum over all ranks. The axis must divide by the group's size."""
        with self._call("reduce_scatter", x.size, x.dtype, reason):
            if self.size == 1:
                return x
            if nccl := self._nccl(x):
                return nccl.reduce_scatter(x, axis)
            carrier = self._carrier(x)
            given = carrier.to_buffer(x)
            parts = np.split(given, self.size, axis)
            mine = carrier.empty(parts[0].shape, x)
            if shared := self._shared_memory(given):
                shared.reduce_scatter(parts, mine, sum_in_rank_order)
            elif is_half(mine):
                mine = self._reduce_pieces(np.stack(parts), "sum")
            else:
                self.comm.Reduce_scatter_block(mpi_view(np.stack(parts)), mpi_view(mine), MPI.SUM)
            return carrier.take(mine, x)

    def broadcast(self, x, reason: str, root: int = 0):
        """Rank `root`'s x, on every rank. Overwrites x and returns it."""
        with self._call("broadcast", x.size, x.dtype, reason, root):
            if self.size == 1:
                return x
            if nccl := self._nccl(x):
                nccl.broadcast(x, root)
                return x
            carrier = self._carrier(x)
            buffer = carrier.to_buffer(x, filled=self.rank == root)
            self.comm.Bcast(mpi_view(buffer), root)
            carrier.copy_back(buffer, x)
            return x

    def _all_reduce_halves(self, x, op):
        """Reduce the pieces that each rank is given, and gather them: 2 bytes an element on the wire. Overwrites x."""
        flat = x.reshape(-1)
        pieces = np.pad(flat, (0, -flat.size % self.size)).reshape(self.size, -1)
        self.comm.Allgather(mpi_view(self._reduce_pieces(pieces, op)), mpi_view(pieces))
        flat[...] = pieces.reshape(-1)[:flat.size]

    def _reduce_pieces(self, pieces, op):
        """Of every rank's pieces [size, ...], halves, the sum (or maximum) of those for this rank [...]."""
        theirs = np.empty_like(pieces)
        self.comm.Alltoall(mpi_view(pieces), mpi_view(theirs))
        return sum_in_rank_order(theirs, op)

    def _carrier(self, x) -> Carrier:
        """By which MPI gets x."""
        return self.instruments.carriers.mpi if on_device(x) else ON_HOST

    def _nccl(self, x) -> Communicator | None:
        """For collectives of x; None if MPI shall do them. Called by all ranks, which agree."""
        nccl = self.instruments.carriers.nccl
        if nccl is None or not on_device(x):
            return None
        if self.communicator is None:
            self.communicator = Communicator(nccl, self.rank, self.size, self.comm.bcast)
        return self.communicator

    def _shared_memory(self, x) -> SharedMemory | None:
        """For this array of MPI's, or one of its size; None if MPI shall move it. Called by all ranks, which agree."""
        if x.nbytes < SMALL or not self.may_share or on_device(x):
            return None
        found: Any = self.comm.Get_attr(shared_key())
        if found is None:
            found = self._make_shared_memory()
            self.comm.Set_attr(shared_key(), found)
        return found[0]

    def _make_shared_memory(self) -> tuple[SharedMemory | None, MPI.Win | None]:
        """With the window that it lies in; None where ranks are on several machines, or the system has little of it:
        to run out of shared memory is the end of a process.
        """
        _, here = self.place_on_machine()
        room = self.comm.bcast(shared_memory_left() >= ROOM * ranks_here())     # alike on all ranks
        if here < self.size or not room:
            return None, None
        window = MPI.Win.Allocate_shared(bytes_for(self.size) if self.rank == 0 else 0, comm=self.comm)
        window.Lock_all()           # for good: who may write where is seen to by SharedMemory
        memory = np.frombuffer(cast(Any, window.Shared_query(0)[0]), np.uint8)
        if self.rank == 0:
            memory[:self.size * LINE] = 0       # the counts: MPI promises nothing
        window.Sync()
        self.comm.Barrier()
        window.Sync()
        forget_shared_memory()
        return SharedMemory(memory, self.rank, self.size, window.Sync, self.comm.Iprobe), window

    # ---- what is posted now and waited for later ----

    def post_send(self, x, to: int, tag: int, reason: str) -> "Pending":
        """Send x to rank `to`, which posts a receive with the same tag. x must stay as it is until the wait is over."""
        hosts = self.instruments.hosts
        self._record("send", x.size, x.dtype, reason, hosts.crossing("send", [self.ranks[self.rank], self.ranks[to]]))
        with self._posting(x, reason) as clock:
            buffer = self._carrier(x).to_buffer(x)
            request = self.comm.Isend(mpi_view(buffer), to, 2 * tag)
            pending = Pending(self, f"send {reason}", [request], buffer, buffer, [self.ranks[to]])
            if clock is not None:
                pending.stamp[0] = clock.tell()
                pending.requests.append(self.comm.Isend(pending.stamp, to, 2 * tag + 1))
        return pending

    def post_receive(self, x, source: int, tag: int, reason: str) -> "Pending":
        """Receive into x what rank `source` sends with this tag. x has it once the wait is over."""
        with self._posting(x, reason) as clock:
            buffer = self._carrier(x).to_buffer(x, filled=False)
            request = self.comm.Irecv(mpi_view(buffer), source, 2 * tag)
            pending = Pending(self, f"receive {reason}", [request], buffer, x, [self.ranks[source]])
            if clock is not None:
                pending.takes = clock.link.seconds("send", 2, x.nbytes)
                pending.requests.append(self.comm.Irecv(pending.stamp, source, 2 * tag + 1))
        return pending

    def post_all_reduce(self, x, reason: str) -> "Pending":
        """Begin the elementwise sum over all ranks, which post in the same order. x has it once the wait is over."""
        return self._post("all_reduce", self.comm.Iallreduce, x, x, reason)

    def post_all_gather(self, x, out, reason: str) -> "Pending":
        """Begin to join every rank's x [n] in out [n * size], in rank order. x may be this rank's own part of out.

        Both belong to the call until the wait is over; `wait` returns out. All ranks post in the same order.
        """
        assert out.size == x.size * self.size, f"{x.size} elements of {self.size} ranks do not fill {out.size}"
        return self._post("all_gather", self.comm.Iallgather, x, out, reason)

    def post_reduce_scatter(self, x, out, reason: str) -> "Pending":
        """Begin the elementwise sum over all ranks of x [n * size]: rank i gets the i-th n elements of it in out [n].

        x must stay as it is until the wait is over, which returns out; out may be this rank's own part of x, which is
        the sum from then on. All ranks post in the same order.
        """
        assert x.size == out.size * self.size, f"{x.size} elements are not {out.size} for each of {self.size} ranks"
        return self._post("reduce_scatter", self.comm.Ireduce_scatter_block, x, out, reason)

    def _post(self, operation, begin, x, out, reason):
        """Post a collective from x to out: `begin` is MPI's, which adds up where it reduces, unless told otherwise."""
        assert x.dtype == out.dtype, f"{x.dtype} cannot become {out.dtype} on the way"      # MPI would not notice
        assert operation == "all_gather" or not is_half(x), f"{x.dtype} is added up by blocking calls only"
        whole = x if x.size > out.size else out
        self._record(operation, whole.size, whole.dtype, reason, self._crossing(operation))
        if self.size == 1:
            if out is not x:
                out[...] = x
            return Pending(self, reason, [], out, out, [])
        with self._posting(x, reason) as clock:
            if nccl := self._nccl(x):
                pending = Pending(self, reason, [], out, out, self.others, x, nccl.post(operation, x, out))
            else:
                sent, received = disjoint_buffers(self._carrier(x), x, out)
                request = begin(mpi_view(sent), mpi_view(received))
                pending = Pending(self, reason, [request], received, out, self.others, sent)
            if clock is not None:
                pending.stamp[0] = clock.tell()
                pending.takes = clock.link.seconds(operation, self.size, whole.nbytes)
                pending.requests.append(self.comm.Iallreduce(MPI.IN_PLACE, pending.stamp, MPI.MAX))
        return pending

    # ---- small objects, and the group itself ----

    def broadcast_object(self, make, reason: str = ""):
        """`make()` of the group's first rank, on every rank: any picklable object, or the UserError it raised.

        For what only one rank should do (read a file, train a tokenizer) and all must agree on, failure included. With
        a reason the others' wait is limited; without one it takes what time it takes, as long as heartbeats are heard.
        Such objects are small, and are not in the ledger.
        """
        with nullcontext() if reason else self.long_work():
            outcome = None
            if self.rank == 0:
                try:
                    outcome = make()
                except UserError as error:
                    outcome = error
            with self._waiting_for(self.others[:1], reason):
                outcome = self.comm.bcast(outcome)
        if isinstance(outcome, UserError):
            raise outcome
        return outcome

    def collect_objects(self, make, reason: str = "") -> list:
        """`make()` of every rank, in rank order, on every rank; or the UserError of the first rank that raised one.

        For what each rank does with files of its own, while all must agree on failure. Limited as `broadcast_object`.
        """
        with nullcontext() if reason else self.long_work():
            try:
                outcome = make()
            except UserError as error:
                outcome = error
            with self._waiting_for(self.others, reason):
                outcomes = self.comm.allgather(outcome)
        for outcome in outcomes:
            if isinstance(outcome, UserError):
                raise outcome
        return outcomes

    @contextmanager
    def long_work(self):
        """Let some ranks work for as long as it takes inside of this `with`, while others wait for them in
        `broadcast_object` or `collect_objects`: all let one another hear that they live. Called by all ranks.
        """
        if not self._hears_neighbours():
            yield
            return
        ring: Any = self.comm.Get_attr(ring_key())
        if ring is None:
            ring = Ring(self.comm)
            self.comm.Set_attr(ring_key(), ring)
        with self.watchdog.beating(ring):
            yield
        with self.watchdog.waiting(self.name, "the end of long work", [self.ranks[ring.before]]):
            ring.end()

    def _waiting_for(self, ranks: Sequence[int], reason: str):
        """Limit a wait: for these ranks if there is a reason, else for a heartbeat of the rank before this one."""
        if reason:
            return self.watchdog.waiting(self.name, reason, ranks)
        if self._hears_neighbours():
            return self.watchdog.waiting(self.name, "a sign of life", [self.ranks[self.rank - 1]], while_silent=True)
        return nullcontext()

    def _hears_neighbours(self) -> bool:
        """Report whether there is a limit, and MPI lets a second thread hear other ranks while the first one waits."""
        return self.size > 1 and self.watchdog.limit < math.inf and MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def forget_heartbeats(self) -> None:
        """Receive those of long work that failed: MPI ends badly where messages are left."""
        while self.comm.Iprobe(MPI.ANY_SOURCE, ALIVE):
            self.comm.Recv(bytearray(1), MPI.ANY_SOURCE, ALIVE)

    def allgather_objects(self, value) -> list:
        """Every rank's value, in rank order, on every rank: small picklable objects, which are not in the ledger."""
        with self.watchdog.waiting(self.name, "every rank's word", self.others):
            return self.comm.allgather(value)

    def place_on_machine(self) -> tuple[int, int]:
        """This rank's number among the group's ranks on its machine, and how many they are. Called by all ranks.

        It sets no time limit: who calls it inside of a collective has one, which it would take away.
        """
        here = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        place = here.rank, here.size
        here.Free()
        return place

    def hosts(self) -> Hosts:
        """Which ranks are on which host. The first time it is called by all of them together."""
        found: Any = self.comm.Get_attr(hosts_key())
        if found is None:
            here = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
            first = here.allreduce(self.rank, MPI.MIN)
            here.Free()
            words = self.allgather_objects((first, MPI.Get_processor_name()))
            numbers = {first: number for number, first in enumerate(sorted({first for first, _ in words}))}
            found = Hosts({rank: numbers[first] for rank, (first, _) in zip(self.ranks, words)},
                          tuple(words[first][1] for first in numbers))
            self.comm.Set_attr(hosts_key(), found)
        return found

    def split(self, color: int, name: str) -> "Group":
        """The ranks of this group that give the same color, in this group's order. Called by all of them."""
        with self.watchdog.waiting(self.name, f"the {name} groups", self.others):
            return Group(MPI.Intracomm(self.comm.Split(color, self.rank)), name, self.instruments)

    def subgroup(self, ranks: Sequence[int], name: str) -> "Group":
        """These ranks of the group, in this order. Called by them alone."""
        with self.watchdog.waiting(self.name, f"the {name} group", [self.ranks[rank] for rank in ranks]):
            return Group(self.comm.Create_group(self.comm.group.Incl(ranks)), name, self.instruments)

    def free(self) -> None:
        """Give the communicator back to MPI, which has only a few thousand, and the memory. Called by all ranks."""
        found: Any = self.comm.Get_attr(shared_key())
        if found and found[1]:
            _, window = found
            window.Unlock_all()
            window.Free()
        if self.communicator:
            self.communicator.free()
        self.comm.Free()

    def barrier_with_timeout(self, seconds: float) -> bool:
        """A barrier with a time limit: whether all ranks got here."""
        request, deadline = self.comm.Ibarrier(), time.monotonic() + seconds
        while not request.Test():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def elect_speaker(self, seconds: float) -> bool:
        """Whether this rank is the one to speak, of those that ask this: the first, or the lowest of several.

        For threads of ranks that are stuck: nobody is waited for, but all hear of it within so many seconds. On several
        hosts, if they are known, one speaks on each: who is on the other side of a link that is cut hears nothing, and
        to send there is the end of MPICH, and of the rank.
        """
        found: Any = self.comm.Get_attr(hosts_key())
        host_of = found.of if found else dict.fromkeys(self.ranks)
        among = [i for i, rank in enumerate(self.ranks) if host_of[rank] == host_of[self.ranks[self.rank]]]
        if self._heard_from([MPI.ANY_SOURCE], seconds / 4):
            return False
        for rank in among:
            if rank != self.rank:
                self.comm.Isend([None, 0, MPI.BYTE], rank, SPEAKS)
        return not self._heard_from([rank for rank in among if rank < self.rank], seconds)

    def _heard_from(self, sources: Iterable[int], seconds: float) -> bool:
        """Whether one of these ranks has said that it speaks, or says so in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:      # MPI makes little progress unless it is asked, again and again
            if any(self.comm.Iprobe(source, SPEAKS) for source in sources):
                return True
            time.sleep(0.01)
        return False

    # ---- the instruments ----

    @contextmanager
    def _call(self, operation, elements, dtype, reason, root=0):
        """A collective: begun by all, and over when the last of them has come. (By NCCL it is then on the device's
        stream, and no more: a trace shows when that was.)
        """
        self._record(operation, elements, dtype, reason, self._crossing(operation, root))
        clock = self._virtual_clock()
        if self.size == 1:
            yield
            return
        with self.trace.slice("communication", reason, "communication"), \
                self.watchdog.waiting(self.name, reason, self.others):
            if clock is None:
                yield
                return
            clock.pause()
            latest = np.array([clock.tell()])
            self.comm.Allreduce(MPI.IN_PLACE, latest, MPI.MAX)
            yield
            clock.reach(latest[0] + clock.link.seconds(operation, self.size, elements * np.dtype(dtype).itemsize))
            clock.resume()

    @contextmanager
    def _posting(self, x=None, reason=""):
        """What is posted takes no time of its own. -> the virtual clock, if there is one that others want to know.

        But before it can lend x, a device may have to wait for other ranks, by NCCL: that has a limit.
        """
        self.trace.clock.pause()
        limited = x is not None and on_device(x)
        with self.watchdog.waiting(self.name, reason, self.others) if limited else nullcontext():
            yield self._virtual_clock()
        self.trace.clock.resume()

    def _record(self, operation, elements, dtype, reason, crossing):
        self.ledger.record(operation, self.name, self.size, reason, elements, dtype, crossing)

    def _crossing(self, operation, root=0) -> float | None:
        """The share of a collective that crosses between hosts; None on one host."""
        return self.instruments.hosts.crossing(operation, self.ranks, root)

    def _virtual_clock(self) -> VirtualClock | None:
        """The clock, if ranks must tell one another what time it is; a rank alone need not."""
        clock = self.trace.clock
        return clock if isinstance(clock, VirtualClock) and self.size > 1 else None


class Ring:
    """A communicator's ranks in a ring, as heartbeats go round it (watchdog.py): seen by one of them.

    A heartbeat is a message without a byte. At the end of each long work one has a byte, so that each rank knows when
    it has received all: with messages that nobody has received, MPICH's shutdown takes ranks down that still work.
    """

    def __init__(self, comm: MPI.Intracomm):
        self.comm, self.before, self.after = comm, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self.lock = threading.Lock()        # two threads listen
        self.ended = self.heard_end = 0     # how many long works: here, and of the rank before

    def beat(self) -> None:
        with suppress(MPI.Exception):   # who cannot be reached hears nothing
            self.comm.Isend([None, 0, MPI.BYTE], self.after, ALIVE)

    def heard(self) -> bool:
        heard, status = False, MPI.Status()
        with self.lock:
            while self.comm.Iprobe(self.before, ALIVE):
                self.comm.Recv(bytearray(1), self.before, ALIVE, status)
                self.heard_end += status.Get_count(MPI.BYTE)
                heard = True
        return heard

    def end(self) -> None:
        """Let the next rank know that this long work has ended here, and wait until it has on the rank before."""
        self.comm.Isend([b".", 1, MPI.BYTE], self.after, ALIVE)
        self.ended += 1
        while self.heard_end < self.ended:
            if not self.heard():
                time.sleep(0.001)


class Pending:
    """Something that was posted and goes on by itself, as far as MPI lets it: `wait` ends it, `poll` helps it on."""

    def __init__(self, group: Group, reason: str, requests: list, buffer, x, others: Sequence[int], sent=None,
                 flight: NcclRequest | None = None):
        """`others` are the ranks of the world that it takes. `sent` must live until the end: not every request sees to
        that, and who posted it may have let go of a copy. By NCCL it is a `flight`.
        """
        self.group, self.reason, self.requests, self.others = group, reason, requests, others
        self.buffer, self.x, self.sent, self.flight = buffer, x, sent, flight
        self.stamp, self.takes = np.zeros(1), 0.0      # for a virtual clock: the latest start, and seconds from there

    def poll(self) -> bool:
        """Whether it is over. MPI makes little progress unless it is asked."""
        with self.group._posting():
            over = MPI.Request.Testall(self.requests) and (self.flight is None or self.flight.done())
        if over:
            self.release()
        return over

    def release(self) -> None:
        """It is over: x has what was sent, and may change from now on, so that nothing must be copied to it again."""
        if self.buffer is not self.x:
            self.group._carrier(self.x).copy_back(self.buffer, self.x)
        self.buffer, self.sent = self.x, None

    def wait(self):
        """Until what was posted may be used again (a send), or has what was sent (the others). -> that array.

        By NCCL it is the device that waits, before what it is told next.
        """
        if not self.requests and not self.flight:
            return self.x
        group, clock = self.group, self.group._virtual_clock()
        with group.trace.slice("communication", self.reason, "communication"), \
                group.watchdog.waiting(group.name, self.reason, self.others):
            if clock is not None:
                clock.pause()
            MPI.Request.Waitall(self.requests)
            if self.flight:
                self.flight.join()
            self.release()
            self.requests, self.flight = [], None
            if clock is not None:
                clock.reach(self.stamp[0] + self.takes)
                clock.resume()
        return self.x


def world(instruments: Instruments | None = None) -> Group:
    """All ranks that were started together."""
    return Group(MPI.COMM_WORLD, "world", instruments or Instruments())


def abort(status: int) -> None:
    """End every rank of the world now, with this exit status."""
    MPI.COMM_WORLD.Abort(status)


def library() -> str:
    """The MPI in use, as 'MPICH 5.0.2'."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def reads_devices() -> bool:
    """Whether this MPI is CUDA-aware: whether it takes arrays on a device as they are."""
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(query and query())


@cache
def shared_key() -> int:
    """Under which a communicator holds its SharedMemory, and the window that it lies in."""
    return MPI.Comm.Create_keyval()


@cache
def hosts_key() -> int:
    """Under which a communicator holds its Hosts, once they are known."""
    return MPI.Comm.Create_keyval()


@cache
def ring_key() -> int:
    """Return the key under which a communicator holds its Ring."""
    return MPI.Comm.Create_keyval()


def sum_in_rank_order(parts, op: str = "sum"):
    """The elementwise sum (or maximum) of parts [size, ...], one of each of two ranks or more -> [...].

    In the ranks' order; of halves in float32, and rounded once: whoever does it, and whatever MPI, gets the same bits.
    """
    total = UFUNCS[op](widened(parts[0]), widened(parts[1]))
    for one in parts[2:]:
        UFUNCS[op](total, widened(one), out=total)
    return narrowed(total, parts.dtype)


def mpi_view(x):
    """The elements of a contiguous array as MPI can move them: halves as integers, the others as they are.

    MPI takes what lies on a device as it finds it, so what is to be done there is done first.
    """
    if x is MPI.IN_PLACE:
        return x
    if on_device(x):
        finish()
    return x.view(np.uint16) if is_half(x) else x


def disjoint_buffers(carrier: Carrier, x, out):
    """What MPI can send for x, and a buffer to receive in for out. MPI wants no element in both.

    Where x and out overlap, a copy stands in for the smaller one.
    """
    sent = carrier.to_buffer(x)
    if out is x:
        return MPI.IN_PLACE, sent
    received = carrier.to_buffer(out, filled=False)
    if not np.may_share_memory(sent, received):
        return sent, received
    return (sent.copy(), received) if sent.size < received.size else (sent, np.empty_like(received))
