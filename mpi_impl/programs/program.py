"""The skeleton of the programs that run a model: where they compute, what watches them, what they say, how they end."""
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from mpi_impl.comm.clock import VirtualClock, WallClock
from mpi_impl.comm.device import device_of
from mpi_impl.comm.group import Group, Instruments, world
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.watchdog import Watchdog
from mpi_impl.launching.entry import give_up, leave_within


class Program(ABC):
    """One rank's part of a program. All files are checked, and all is loaded, when it is made; then it can `run`."""

    def __init__(self, args: Any, ranks: Group):
        """Find the device on which this rank computes, and the way in which its arrays get to others."""
        self.args, self.world, self.first = args, ranks, ranks.rank == 0
        self.device = device_of(args.device, ranks, args.distributed_backend)
        ranks.instruments.device_path = self.device.path
        ranks.instruments.hosts = ranks.hosts()

    @abstractmethod
    def work(self) -> None:
        """Do what the program is for."""

    def run(self) -> None:
        """Do the work, and wait until all ranks have done theirs: what is left is MPI's shutdown."""
        self.work()
        self.world.allgather_objects(None)

    def say(self, text: str) -> None:
        """Print a text, on rank 0."""
        if self.first:
            print(text, flush=True)


def run_program(make: Callable[[Group], Program], args: Any) -> None:
    """Make a program on every rank of the world, under the time limit of its options, and run it to its end."""
    limit = 60 * args.distributed_timeout_minutes
    clock = VirtualClock() if getattr(args, "trace_clock", "wall") == "virtual" else WallClock()
    make(world(Instruments(trace=Trace(clock), watchdog=Watchdog(limit, give_up)))).run()
    leave_within(limit)
