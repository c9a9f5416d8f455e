"""The request to stop that a run gets as SIGTERM: batch systems send it some time before they kill a job."""
import signal

from mpi_impl.comm.group import Group


class StopRequest:
    """A SIGTERM that any rank receives from now on: it is remembered, and does not end the process."""

    def __init__(self, world: Group):
        self.world, self.received = world, False
        signal.signal(signal.SIGTERM, self.receive)

    def receive(self, *_: object) -> None:
        self.received = True

    def agreed(self) -> bool:
        """Report whether any rank has received it. All ranks call this, and get the same answer."""
        return self.world.any_rank(self.received)
