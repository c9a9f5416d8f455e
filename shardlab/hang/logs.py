"""The lines that PyTorch's watchdog writes before it ends a job: the call in which each rank has waited too long.

They are less than a dump, which lists all calls. Since PyTorch 2.5 a second line names the group, by a name that all of
its ranks use (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). Before, only the group of all ranks is known, as
number 0.
"""
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mpi_impl.comm.watchdog import listed
from mpi_impl.runtime.files import LARGEST, read_bytes

RANK = r"(?:\[rank(?P<world>\d+)\]:)?\[[^\]]*ProcessGroupNCCL\.cpp:\d+\] \[(?:PG (?:ID )?(?P<id>\d+) )?"
GROUP = r"(?:PG GUID (?P<guid>[^\s\]]+) )?Rank (?P<rank>\d+)\]"
TIMEOUT = re.compile(rf"{RANK}{GROUP} Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), "
                     r"OpType=(?P<call>\w+(?:, NumelIn=\d+, NumelOut=\d+)?)")
IN_GROUP = re.compile(rf"{RANK}{GROUP}.* at work(?: sequence id)?: (?P<number>\d+)")
MESSAGES = ("SEND", "RECV", "COALESCED", "UNKNOWN")     # of some ranks of a group, with numbers of their own
EVEN = ("ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE")      # of one size on all ranks


class Timeout(NamedTuple):
    """A call in which a rank has waited too long."""

    number: int         # of the call, in its group
    rank: int
    call: str
    group: str          # "" if the lines do not tell

    @property
    def same_on_all(self) -> str:
        """Return the part of the call that is the same on all ranks."""
        operation = self.call.partition(",")[0]
        return self.call if operation in EVEN else operation


def timeouts_in(paths: Sequence[str]) -> list[Timeout]:
    """Return the first timeout of each rank in each group, of these files; none in folders and dumps."""
    lines = [line for path in paths if os.path.isfile(path)
             for line in read_bytes(path, LARGEST).decode(errors="replace").splitlines()]
    groups = {(rank_of(match), match["number"]): match for match in filter(None, map(IN_GROUP.search, lines))}
    found = dict[tuple[int, str], Timeout]()
    for match in filter(None, map(TIMEOUT.search, lines)):
        rank, number = rank_of(match), match["number"]
        about = groups.get((rank, number), match)
        one = Timeout(int(number), rank, match["call"], about["guid"] or ("0" if about["id"] == "0" else ""))
        found[rank, one.group] = min(one, found.get((rank, one.group), one))
    return sorted(found.values())


def rank_of(match: re.Match[str]) -> int:
    """Return the rank of the world, or that of the group, if a line has no other."""
    return int(match["world"] or match["rank"])


def report(timeouts: Sequence[Timeout]) -> str:
    """Tell where ranks wait, and which of them have not made the same calls."""
    lines, by_group = list[str](), defaultdict[str, list[Timeout]](list)
    for one in timeouts:
        by_group[one.group].append(one)
    for group, waiting in by_group.items():
        by_call = defaultdict[tuple[int, str], list[int]](list)
        for one in waiting:
            by_call[one.number, one.call].append(one.rank)
        where = f"In group {group}" if group else "In a group that the lines do not name"
        lines += [f"{where} {listed(ranks)} waited too long in call {number}, {call}."
                  for (number, call), ranks in sorted(by_call.items())]
        if group:
            lines += parting([one for one in waiting if one.same_on_all not in MESSAGES])
    one_call = len({(one.number, one.group, one.call) for one in timeouts}) == 1
    return "\n".join([*lines, "", "All of them wait in one call: look at the ranks of its group that are not among "
                      "them, or, if all are, at the network and the GPUs' errors." if one_call else
                      "The dumps of the flight recorder tell more: run with TORCH_FR_BUFFER_SIZE=2000."])


def parting(waiting: Sequence[Timeout]) -> list[str]:
    """Say which ranks of a group have not made the same collectives."""
    first = [one for one in waiting if one.number == waiting[0].number]
    if len({one.same_on_all for one in first}) > 1:
        return [f"They have made different calls as number {first[0].number}: look at what they did before it."]
    if len(first) == len(waiting):
        return []
    return [f"The others have gone beyond call {first[0].number}, in which {listed([one.rank for one in first])} "
            "waited: look at what these ranks have called there, and at the calls before it."]
