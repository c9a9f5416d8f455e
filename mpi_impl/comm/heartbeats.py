"""Heartbeats: how ranks know during long work that the others are alive (watchdog.py sends them, and listens)."""
import math
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from mpi4py import MPI

from mpi_impl.comm.members import Members
from mpi_impl.comm.mpi_library import attribute_key

HEARTBEAT = 32_765      # a tag, which every MPI allows


@contextmanager
def long_work(group: Members):
    """Let some ranks work for as long as it takes inside of this `with`, while others wait for them in
    `broadcast_object` or `collect_objects`: all send one another heartbeats. All ranks call this.
    """
    if not can_listen(group):
        yield
        return
    ring: Any = group.comm.Get_attr(attribute_key("ring"))
    if ring is None:
        ring = Ring(group.comm)
        group.comm.Set_attr(attribute_key("ring"), ring)
    with group.watchdog.beating(ring):
        yield
    with group.watchdog.waiting(group.name, "the end of long work", [group.ranks[ring.before]]):
        ring.end()


def listening(group: Members):
    """Limit a wait inside of long work by the time without a heartbeat of the rank before this one."""
    if not can_listen(group):
        return nullcontext()
    return group.watchdog.waiting(group.name, "a sign of life", [group.ranks[group.rank - 1]], while_silent=True)


def can_listen(group: Members) -> bool:
    """Report whether there is a limit, and MPI lets a second thread hear other ranks while the first one waits."""
    return group.size > 1 and group.watchdog.limit < math.inf and MPI.Query_thread() == MPI.THREAD_MULTIPLE


def drain_heartbeats(group: Members) -> None:
    """Receive the heartbeats of long work that failed: MPI ends badly if messages are left."""
    while group.comm.Iprobe(MPI.ANY_SOURCE, HEARTBEAT):
        group.comm.Recv(bytearray(1), MPI.ANY_SOURCE, HEARTBEAT)


class Ring:
    """A communicator's ranks in a ring, as heartbeats go round it, seen by one of them.

    A heartbeat is a message without a byte. At the end of each long work one has a byte, so that each rank knows when
    it has received all: with messages that nobody has received, MPI's shutdown may take ranks down that still work.
    """

    def __init__(self, comm: MPI.Intracomm):
        self.comm, self.before, self.after = comm, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self.lock = threading.Lock()        # two threads listen
        self.ended = self.heard_end = 0     # how many long works: here, and of the rank before

    def beat(self) -> None:
        """Send a heartbeat to the next rank."""
        with suppress(MPI.Exception):   # a rank that cannot be reached hears nothing
            self.comm.Isend([None, 0, MPI.BYTE], self.after, HEARTBEAT)

    def heard(self) -> bool:
        """Report whether the rank before this one has sent any since the last time."""
        heard, status = False, MPI.Status()
        with self.lock:
            while self.comm.Iprobe(self.before, HEARTBEAT):
                self.comm.Recv(bytearray(1), self.before, HEARTBEAT, status)
                self.heard_end += status.Get_count(MPI.BYTE)
                heard = True
        return heard

    def end(self) -> None:
        """Tell the next rank that this long work has ended here, and wait until it has on the rank before."""
        self.comm.Isend([b".", 1, MPI.BYTE], self.after, HEARTBEAT)
        self.ended += 1
        while self.heard_end < self.ended:
            if not self.heard():
                time.sleep(0.001)
