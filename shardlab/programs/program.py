"""The common part of all programs that run a model: their device, their instruments, their output, their end."""
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from mpi_impl.comm.clock import VirtualClock, WallClock
from mpi_impl.comm.device import device_of
from mpi_impl.comm.group import Group, Instruments, world
from mpi_impl.comm.topology import Topology, connect, disconnect
from mpi_impl.comm.trace import Trace
from mpi_impl.comm.watchdog import Watchdog
from mpi_impl.kernels.cuda import flash
from mpi_impl.launch.entry import give_up, leave_within
from reference.config import ParallelConfig


class Program(ABC):
    """One rank's part of a program. Its constructor checks all files and loads everything; then it can `run`."""

    def __init__(self, args: Any, ranks: Group):
        """Find the device on which this rank computes, and the path on which its arrays get to other ranks."""
        self.args, self.world, self.first = args, ranks, ranks.rank == 0
        self.device = device_of(args.device, ranks, args.distributed_backend)
        ranks.instruments.like, ranks.instruments.device_path = self.device.like, self.device.path
        ranks.instruments.hosts = ranks.hosts()
        self.at_the_end = ExitStack()

    @property
    def has_cudnn(self) -> bool:
        """Report whether cuDNN computes attention in 16 bits, where it can."""
        return self.args.device != "cpu" and flash.is_available()

    def connect(self, parallel: ParallelConfig) -> Topology:
        """Form the groups of the program's ranks. `run` gives them back to MPI."""
        topology = connect(self.world, parallel)
        self.at_the_end.callback(disconnect, topology)
        return topology

    @abstractmethod
    def work(self) -> None:
        """Do the work of the program."""

    def run(self) -> None:
        """Do the work, and wait until all ranks have done theirs: only MPI's shutdown is left."""
        with ExitStack() as held:
            self.world.broadcast_object(lambda: self.claim_outputs(held))
            self.work()
        self.world.allgather_objects(None)
        self.at_the_end.close()

    def claim_outputs(self, held: ExitStack) -> None:   # noqa: B027 - most programs save nothing
        """Take hold, on rank 0, of what no other run may write until this one has ended."""

    def say(self, text: str) -> None:
        """Print a text, on rank 0."""
        if self.first:
            print(text, flush=True)


def run_program(make: Callable[[Group], Any], args: Any) -> None:
    """Make a Program, or several that run one after the other, on every rank of the world, under the time limit of its
    options, and run it to its end.
    """
    limit = 60 * args.distributed_timeout_minutes
    clock = VirtualClock() if getattr(args, "trace_clock", "wall") == "virtual" else WallClock()
    instruments = Instruments(trace=Trace(clock), watchdog=Watchdog(limit, give_up),
                              compare_calls=getattr(args, "compare_calls", False))
    make(world(instruments)).run()
    leave_within(limit)
