"""Groups of imagined ranks, seen by the one that runs: their calls are recorded, and return immediately.

Who is in which group only all ranks together can say: `split` asks each of them for a color. So the same code that
forms the groups is first run as every rank in turn (`survey`), which takes a few microseconds each.
"""
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mpi_impl.comm.group import Group
from mpi_impl.comm.instruments import Instruments
from mpi_impl.prediction.transport import Diary, RecordingTransport

Colors = list[tuple[int, ...]]      # of each call of the world's `split`: every rank's


class Survey:
    """The world as a rank that only tells its colors."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.colors = rank, size, list[int]()

    def split(self, color: int, name: str) -> "Survey":
        self.colors.append(color)
        return self

    def subgroup(self, ranks: Sequence[int], name: str) -> None:
        """Say nothing: the members know one another."""


def survey(size: int, connect: Callable[[Any], object]) -> Colors:
    """Return the colors that all ranks of a world give in `connect(world)`."""
    found = [Survey(rank, size) for rank in range(size)]
    for world in found:
        connect(world)
    return list(zip(*(world.colors for world in found)))


@cache
def members_by_color(colors: tuple[int, ...]) -> dict[int, list[int]]:
    """Return the ranks that give each color."""
    found = defaultdict[int, list[int]](list)
    for rank, color in enumerate(colors):
        found[color].append(rank)
    return found


class ImaginedGroup(Group):
    """A group of one rank that is there, and others that are not."""

    transports: Any     # the recorder alone

    def __init__(self, ranks: Sequence[int], rank: int, name: str, instruments: Instruments, diary: Diary,
                 colors: Colors):
        """Take the group's ranks in the world, and this rank's number among them. `colors` are those of `survey`."""
        self.name, self.instruments, self.watchdog = name, instruments, instruments.watchdog
        self.size, self.rank, self.ranks = len(ranks), rank, list(ranks)
        self.others = [r for r in ranks if r != ranks[rank]]
        self.ledger, self.trace, self.largest_tag = instruments.ledger, instruments.trace, 1 << 62
        self.diary, self.colors = diary, iter(colors)
        self.transports = RecordingTransport(diary, name, tuple(ranks), rank)

    def split(self, color, name):
        return self.subgroup(members_by_color(next(self.colors))[color], name)

    def subgroup(self, ranks, name):
        own = [self.ranks[rank] for rank in ranks]
        return ImaginedGroup(own, own.index(self.ranks[self.rank]), name, self.instruments, self.diary, [])

    def free(self):
        pass

    def broadcast_object(self, make, reason=""):
        return make()

    def collect_objects(self, make, reason=""):
        return [make()] * self.size

    def allgather_objects(self, value):
        return [value] * self.size

    def _waiting(self, reason, ranks):
        self.transports.reason = reason
        return super()._waiting(reason, ranks)

    def _posting(self, reason="", x=None):
        self.transports.reason = reason
        return super()._posting(reason, x)
