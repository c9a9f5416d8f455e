"""Small objects that ranks tell one another: any that can be pickled. They are not in the ledger."""
from collections.abc import Callable
from contextlib import nullcontext

from mpi4py import MPI

from mpi_impl.comm.heartbeats import listening, long_work
from mpi_impl.comm.members import Members
from reference.errors import UserError


class ObjectGroup(Members):
    """Ranks that exchange objects, and agree on failures: a UserError of one rank is raised on all of them.

    With a reason, a wait has a time limit; without one, work takes the time it takes while heartbeats are heard.
    """

    def broadcast_object(self, make: Callable, reason: str = ""):
        """Return the first rank's `make()`, on every rank: for work that only one rank should do, like reading a file.
        """
        with nullcontext() if reason else long_work(self):
            outcome = attempt(make) if self.rank == 0 else None
            with self._waiting_for(self.others[:1], reason):
                outcome = self.comm.bcast(outcome)
        return raise_or_return(outcome)

    def collect_objects(self, make: Callable, reason: str = "") -> list:
        """Return every rank's `make()`, in rank order, on every rank; or raise the UserError of the first that failed.

        For work that each rank does with files of its own.
        """
        with nullcontext() if reason else long_work(self):
            outcome = attempt(make)
            with self._waiting_for(self.others, reason):
                outcomes = self.comm.allgather(outcome)
        return [raise_or_return(outcome) for outcome in outcomes]

    def collect_on_first(self, make: Callable, reason: str) -> list:
        """Return every rank's `make()`, in rank order, on the first rank alone, and an empty list on the others; raise
        as `collect_objects` does, on every rank. For what is large on all ranks together.
        """
        outcome = attempt(make)
        with self._waiting_for(self.others, reason):
            outcomes = self.comm.gather(outcome) or []
        self.broadcast_object(lambda: raise_first(outcomes), reason)
        return outcomes

    def gather_objects(self, make: Callable) -> list:
        """Return every rank's `make()`, in rank order, on the first rank; an empty list on the others."""
        with long_work(self):
            value = make()
            with listening(self):
                return self.comm.gather(value) or []

    def allgather_objects(self, value) -> list:
        """Return every rank's value, in rank order, on every rank."""
        with self.watchdog.waiting(self.name, "every rank's word", self.others):
            return self.comm.allgather(value)

    def any_rank(self, condition: bool) -> bool:
        """Report whether the condition is true on any rank: each receives a few objects, however many ranks there are.
        """
        with self.watchdog.waiting(self.name, "every rank's word", self.others):
            return self.comm.allreduce(condition, MPI.LOR)

    def _waiting_for(self, ranks, reason: str):
        """Limit a wait: for these ranks if there is a reason, else for a heartbeat of the rank before this one."""
        return self.watchdog.waiting(self.name, reason, ranks) if reason else listening(self)


def attempt(make: Callable):
    """Return `make()`, or the UserError that it raises."""
    try:
        return make()
    except UserError as error:
        return error


def raise_first(outcomes: list) -> None:
    """Raise the first UserError among these, if there is one."""
    for outcome in outcomes:
        raise_or_return(outcome)


def raise_or_return(outcome):
    """Raise a UserError; return anything else."""
    if isinstance(outcome, UserError):
        raise outcome
    return outcome
