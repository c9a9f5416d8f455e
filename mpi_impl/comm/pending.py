"""Calls that were posted, and go on while the rank computes."""
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpi_impl.comm.transports.transport import Request

if TYPE_CHECKING:
    from mpi_impl.comm.group import Group


class Pending:
    """A call that was posted and goes on by itself, as far as MPI lets it: `wait` ends it, `poll` helps it on."""

    def __init__(self, group: "Group", reason: str, requests: list[Request], x, others: Sequence[int]):
        """Hold what is posted. `others` are the ranks of the world that the call takes; x is its result."""
        self.group, self.reason, self.requests, self.x, self.others = group, reason, requests, x, others
        self.stamp, self.takes = np.zeros(1), 0.0      # for a virtual clock: the latest start, and seconds from there

    def poll(self) -> bool:
        """Report whether the call is over. x may be overwritten from then on."""
        with self.group._posting():
            return all([request.done() for request in self.requests])

    def wait(self):
        """Wait until what was posted has arrived, or may be overwritten (a send), and return it.

        With NCCL the device waits, not the host: before the next work on its stream.
        """
        if self.requests:
            with self.group._waiting(self.reason, self.others) as clock:
                for request in self.requests:
                    request.wait()
                if clock is not None:
                    clock.reach(self.stamp[0] + self.takes)
            self.requests = []
        return self.x
