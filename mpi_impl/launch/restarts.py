"""Restarts of a job that has failed, on the hosts that are left.

The command stays the same, as with torchrun. Finding the last checkpoint is the program's part: a training run whose
--save and --load name one folder begins when it is empty, and else resumes. Ranks learn from a variable that they may
be started again, so that a program can refuse to be.

On fewer ranks a run computes the same, up to rounding, if it can be divided among them. Its program decides that: it
refuses a number of ranks as it refuses a wrong option, with status 2, and then the next smaller number is tried.
"""
from collections.abc import Callable, Iterator, Sequence

from mpi_impl.launch.entry import say
from mpi_impl.launch.hostfile import Host, unreachable
from mpi_impl.runtime.tables import count

RESTARTS = "SHARDLAB_MAX_RESTARTS"      # where ranks find --max-restarts
REFUSED = 2
STOPPED = 75    # the status of a run that has stopped on request, and can be resumed: EX_TEMPFAIL of <sysexits.h>

# After these no other start makes sense. The last two: out of time, and interrupted.
FINAL = {0, REFUSED, STOPPED, 124, 130}


def run_with_restarts(run: Callable[[int, Sequence[Host]], int], ranks: int, hosts: Sequence[Host], most: int) -> int:
    """Run a job on ranks of these hosts, or of this machine if there are none, and again if it fails, at most this
    often. Return the last status.
    """
    status = run(ranks, hosts)
    for restart in range(1, most + 1):
        if status in FINAL:
            return status
        left = hosts_left(hosts)
        for n in numbers_of_ranks(ranks, sum(host.slots for host in left) if hosts else ranks):
            say(f"note: the job starts again on {count(n)} (restart {restart} of at most {most}).")
            status = run(n, left)
            if status != REFUSED:
                break
    if most and status not in FINAL:
        say(f"error: the job has failed again, and does not start any more (--max-restarts {most}).")
    return status


def hosts_left(hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts that can be reached now, and say which cannot."""
    lost = unreachable(hosts)
    for problem in lost.values():
        say(f"note: {problem}")
    return [host for host in hosts if host.name not in lost]


def numbers_of_ranks(ranks: int, slots: int) -> Iterator[int]:
    """Yield the numbers of ranks to try, from the largest: all, if there are slots for them. Else every slot that is
    left, and then the divisors of the first number: a replica has a whole number of times the microbatches that it had.
    """
    if slots >= ranks:
        yield ranks
    else:
        yield from (n for n in range(slots, 0, -1) if n == slots or ranks % n == 0)
