"""The members of a group: which ranks they are, where they are, and which groups can be formed of them."""
from collections.abc import Sequence
from typing import Any, Self

from mpi4py import MPI

from mpi_impl.comm.hosts import Hosts
from mpi_impl.comm.instruments import Instruments
from mpi_impl.comm.mpi_library import attribute_key, place_on_machine


class Members:
    """Some ranks, in order."""

    def __init__(self, comm: MPI.Intracomm, name: str, instruments: Instruments):
        self.comm, self.name, self.instruments, self.watchdog = comm, name, instruments, instruments.watchdog
        self.size, self.rank = comm.size, comm.rank
        self.ranks = comm.group.Translate_ranks(None, MPI.COMM_WORLD.group)     # their numbers in the world
        self.others = [r for i, r in enumerate(self.ranks) if i != self.rank]

    def split(self, color: int, name: str) -> Self:
        """Return the group of the ranks that give the same color, in this group's order. All of them call this."""
        with self.watchdog.waiting(self.name, f"the {name} groups", self.others):
            return type(self)(MPI.Intracomm(self.comm.Split(color, self.rank)), name, self.instruments)

    def subgroup(self, ranks: Sequence[int], name: str) -> Self:
        """Return the group of these ranks, in this order. Only they call this."""
        with self.watchdog.waiting(self.name, f"the {name} group", [self.ranks[rank] for rank in ranks]):
            return type(self)(self.comm.Create_group(self.comm.group.Incl(ranks)), name, self.instruments)

    def free(self) -> None:
        """Give the communicator back to MPI, which has only a few thousand. All ranks call this."""
        self.comm.Free()

    def place_on_machine(self) -> tuple[int, int]:
        """Return this rank's number among the group's ranks on its machine, and their count. All ranks call this."""
        with self.watchdog.waiting(self.name, "who is on which machine", self.others):
            return place_on_machine(self.comm)

    def hosts(self) -> Hosts:
        """Return which ranks are on which host. The first call is made by all ranks together."""
        found = self.known_hosts()
        if found is None:
            here = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
            first = here.allreduce(self.rank, MPI.MIN)
            here.Free()
            with self.watchdog.waiting(self.name, "the hosts of all ranks", self.others):
                everyone = self.comm.allgather((first, MPI.Get_processor_name()))
            numbers = {first: number for number, first in enumerate(sorted({first for first, _ in everyone}))}
            found = Hosts({rank: numbers[first] for rank, (first, _) in zip(self.ranks, everyone)},
                          tuple(everyone[first][1] for first in numbers))
            self.comm.Set_attr(attribute_key("hosts"), found)
        return found

    def known_hosts(self) -> Any:
        """Return the hosts if `hosts` has been called before; else None."""
        return self.comm.Get_attr(attribute_key("hosts"))
