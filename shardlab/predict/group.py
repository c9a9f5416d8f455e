"""Groups of imagined ranks, seen by the one that runs: their calls are recorded, and return immediately.

Who is in which group only all ranks together can say: `split` asks each of them for a color. So the same code that
forms the groups is first run as every rank in turn (`survey`), which takes a few microseconds each.
"""
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

from mpi_impl.comm.group import Group
from mpi_impl.comm.instruments import Instruments
from mpi_impl.comm.topology import connect
from reference.config import ParallelConfig
from shardlab.predict.transport import Diary, RecordingTransport

Colors = dict[str, tuple[int, ...]]     # of the groups that the world's `split` forms, by name: every rank's


class Survey:
    """The world as a rank that only tells its colors."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.colors = rank, size, dict[str, int]()

    def split(self, color: int, name: str) -> "Survey":
        self.colors[name] = color
        return self

    def subgroup(self, ranks: Sequence[int], name: str) -> None:
        """Say nothing: the members know one another."""


def survey(parallel: ParallelConfig) -> Colors:
    """Return the colors that all ranks of a world give when they form a topology's groups."""
    found: list[Any] = [Survey(rank, parallel.world_size) for rank in range(parallel.world_size)]
    for world in found:
        connect(world, parallel)
    return {name: tuple(world.colors[name] for world in found) for name in found[0].colors}


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
        self.diary, self.colors = diary, colors
        self.transports = RecordingTransport(diary, name, tuple(ranks), rank)

    def split(self, color, name):
        return self.subgroup(members_by_color(self.colors[name])[color], name)

    def subgroup(self, ranks, name):
        self.diary.groups.append(name)
        own = [self.ranks[rank] for rank in ranks]
        return ImaginedGroup(own, own.index(self.ranks[self.rank]), name, self.instruments, self.diary, {})

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
