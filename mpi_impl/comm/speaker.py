"""The end of ranks that fail together: which of them have reached it, and which one says why."""
import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

from mpi_impl.comm.members import Members

SPEAKS = 32_767      # a tag, which every MPI allows


def barrier_with_timeout(group: Members, seconds: float) -> bool:
    """Wait at most this long for all ranks to come here. Report whether they did."""
    return comes_true(group.comm.Ibarrier().Test, seconds)


def elect_speaker(group: Members, seconds: float) -> bool:
    """Report whether this rank is the one to speak, of those that ask: the first, or the lowest of several.

    For threads of ranks that are stuck: no rank is waited for, but all hear of it within this many seconds. On several
    hosts, if they are known, one rank speaks on each: a rank on the other side of a broken link hears nothing, and to
    send there may be the end of MPI, and of the rank.
    """
    known = group.known_hosts()
    host_of = known.of if known else dict.fromkeys(group.ranks)
    here = [i for i, rank in enumerate(group.ranks) if host_of[rank] == host_of[group.ranks[group.rank]]]
    if _heard_from(group, [MPI.ANY_SOURCE], seconds / 4):
        return False
    for rank in here:
        if rank != group.rank:
            group.comm.Isend([None, 0, MPI.BYTE], rank, SPEAKS)
    return not _heard_from(group, [rank for rank in here if rank < group.rank], seconds)


def _heard_from(group: Members, sources: Sequence[int], seconds: float) -> bool:
    """Report whether one of these ranks has said that it speaks, or says so in time."""
    return comes_true(lambda: any(group.comm.Iprobe(source, SPEAKS) for source in sources), seconds)


def comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Report whether a condition becomes true in time. MPI makes little progress unless it is asked again and again."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
