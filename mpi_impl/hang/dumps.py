"""The dumps of PyTorch's flight recorder: what a rank has lately posted to its groups, and what of it has ended.

A job that hangs leaves a file for each rank, if it ran with TORCH_NCCL_TRACE_BUFFER_SIZE (or TORCH_FR_BUFFER_SIZE) and
TORCH_NCCL_DUMP_ON_TIMEOUT: a pickle of lists, dicts, numbers and texts, or JSON with the same in it (torch/csrc/
distributed/c10d/FlightRecorder.hpp, versions 2.0 to 2.10). A dump is a ring buffer: it may have lost its beginning, but
sequence numbers count from the start of the job.
"""
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from mpi_impl.runtime.files import LARGEST, is_there, read_bytes
from mpi_impl.runtime.formats import decoding, sentence
from mpi_impl.runtime.pickles import read_pickle
from reference.errors import UserError

LIBRARY = re.compile(r"site-packages|dist-packages|[/\\]torch[/\\]")
P2P = re.compile(r"(?:\w+:)?(send|recv)\s+(\d+)(?:->|<-)(\d+)")


class ProcessGroup(NamedTuple):
    """A process group: two may share a name, and have other ranks."""

    name: str
    ranks: tuple[int, ...]      # of the world; () if the dumps do not tell

    def __str__(self) -> str:
        return f"group {self.name}" + (f" (ranks {', '.join(map(str, self.ranks))})" if self.ranks else "")


@dataclass
class Frame:
    """A line of the program that has posted an entry."""

    name: str = ""
    filename: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{os.path.basename(self.filename)}:{self.line}"


@dataclass
class Entry:
    """A collective, or a message to one other rank, as its rank has posted it."""

    record_id: int
    process_group: tuple[str, ...]          # its name, and a description
    profiling_name: str                     # nccl:all_reduce; nccl:send 0->1, which are ranks of the group
    state: str                              # scheduled, started or completed
    collective_seq_id: int = 0              # counts the collectives of its group, from the start of the job
    p2p_seq_id: int = 0
    is_p2p: bool = False
    input_sizes: list[list[int]] = field(default_factory=list)
    output_sizes: list[list[int]] = field(default_factory=list)
    input_dtypes: list[str] = field(default_factory=list)
    time_discovered_completed_ns: int | None = None
    pg_id: int = 0
    frames: list[Frame] = field(default_factory=list)

    @cached_property
    def operation(self) -> str:
        """Return all_reduce of nccl:all_reduce."""
        return self.profiling_name.partition(":")[2] or self.profiling_name

    @cached_property
    def message(self) -> tuple[str, int, int] | None:
        """Return of a message to or from one rank ("send", its rank, the other's), as ranks of the group."""
        found = P2P.fullmatch(self.profiling_name)
        return (found[1], int(found[2]), int(found[3])) if found else None

    @cached_property
    def signature(self) -> tuple:
        """Return what all ranks must have in common: the operation, and the sizes where they are the same on all."""
        if self.operation.startswith(("all_to_all", "alltoall", "coalesced", "gather", "barrier")):
            return (self.operation,)
        sizes = self.output_sizes if self.operation.startswith("scatter") else self.input_sizes
        return (self.operation, tuple(map(tuple, sizes)), tuple(self.input_dtypes))

    @property
    def place(self) -> str:
        """Return the program's own line, which is the first that is not in a library's folder."""
        own = next((one for one in self.frames if not LIBRARY.search(one.filename)), None)
        return f" at {own}" if own else ""

    def __str__(self) -> str:
        if self.message:
            kind, mine, other = self.message
            return f"{kind} {mine}{'->' if kind == 'send' else '<-'}{other}"
        sizes = ", ".join(str(size) for size in (self.input_sizes or self.output_sizes))
        return f"{self.operation}{f' of {sizes}' if sizes else ''}"


@dataclass
class GroupStatus:
    """The numbers of collectives of a group, which gloo keeps to date where it leaves its entries as they were."""

    last_completed_collective: int = -1


@dataclass
class Content:
    """The part of a dump that is used."""

    entries: list[Entry]
    pg_config: dict[str, dict[str, Any]] = field(default_factory=dict)          # by the group's name,
    pg_status: dict[str, GroupStatus] = field(default_factory=dict)             # and by its number


@dataclass
class Dump:
    """The entries of a rank, in the order in which it posted them. (gloo does not list its groups: all are named "".)
    """

    rank: int
    entries: list[Entry]
    groups: dict[str, tuple[int, ...]]      # the ranks of each group, by its name
    status: dict[str, GroupStatus]

    def group_of(self, entry: Entry) -> ProcessGroup:
        name = entry.process_group[0]
        return ProcessGroup(name, self.groups.get(name, ()))

    def has_ended(self, entry: Entry) -> bool:
        last = self.status.get(str(entry.pg_id), GroupStatus()).last_completed_collective
        return (entry.state == "completed" or bool(entry.time_discovered_completed_ns)
                or not entry.is_p2p and 0 < entry.collective_seq_id <= last)


# ---- read -----------------------------------------------------------------------------------------------------------


def read_all(paths: Sequence[str]) -> list[Dump]:
    """Read the dumps of a folder, or these files, by rank. Raises UserError for a file that is none."""
    dumps: dict[int, Dump] = {}
    names = dict[int, str]()
    for path in files_of(paths):
        rank = rank_of(path)
        if rank in dumps:
            raise UserError(f"{names[rank]} and {path} are both of rank {rank}, by their names: give one dump of each "
                            "rank, of one job.")
        dumps[rank], names[rank] = read(path, rank), path
    return [dumps[rank] for rank in sorted(dumps)]


def files_of(paths: Sequence[str]) -> list[str]:
    """Return the files, and those in the folders, whose names end in a rank."""
    found: list[str] = []
    for path in paths:
        if not is_there(path):
            raise UserError(f"{path} is not there. Name the folder with the dumps, or the dumps.")
        if os.path.isdir(path):
            inside = sorted(name for name in os.listdir(path) if NUMBERED.search(name))
            if not inside:
                raise UserError(f"{path} holds no dump: the name of one ends in its rank, as in comm_lib_trace_rank_0 "
                                "or rank_0.json.")
            found += (os.path.join(path, name) for name in inside)
        else:
            found.append(path)
    return found


NUMBERED = re.compile(r"(\d+)(?:\.(?:json|pickle|pkl))?$")


def rank_of(path: str) -> int:
    found = NUMBERED.search(os.path.basename(path))
    if not found:
        raise UserError(f"{path} does not say whose dump it is: its name must end in the rank, as that of "
                        "comm_lib_trace_rank_0 does.")
    return int(found[1])


def read(path: str, rank: int) -> Dump:
    """Read a dump, a pickle or JSON. Raises UserError."""
    start = read_bytes(path, LARGEST)[:1]
    if start in (b"{", b"["):
        with decoding(path, "JSON"):
            found = json.loads(read_bytes(path, LARGEST))
    else:
        found = read_pickle(path)
    try:
        content = msgspec.convert(found, Content, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"{path} is not a dump of PyTorch's flight recorder: {sentence(error)}.") from error
    groups = {config.get("name", name): ranks_of(config.get("ranks", "")) for name, config in content.pg_config.items()}
    return Dump(rank, sorted(content.entries, key=lambda entry: entry.record_id), groups, content.pg_status)


def ranks_of(text: Any) -> tuple[int, ...]:
    """Return the ranks of "[0, 1]", or of the list."""
    if isinstance(text, Iterable) and not isinstance(text, str):
        return tuple(sorted(int(rank) for rank in text))
    return tuple(sorted(map(int, re.findall(r"\d+", str(text)))))
