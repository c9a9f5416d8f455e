"""The dumps of PyTorch's flight recorder: what a rank has lately posted to its groups, and what of it has ended.

A job that hangs leaves a file for each rank, if it ran with TORCH_NCCL_TRACE_BUFFER_SIZE (or TORCH_FR_BUFFER_SIZE) and
TORCH_NCCL_DUMP_ON_TIMEOUT: a pickle of lists, dicts, numbers and texts, or JSON with the same in it (torch/csrc/
distributed/c10d/FlightRecorder.hpp, versions 2.0 to 2.10). A dump is a ring buffer: it may have lost its beginning, but
sequence numbers of collectives count from the start of the job.

The counters of pg_status are not read: NCCL and gloo both set them to the number of whatever ended last, be it a
collective or a message, and the two are numbered apart.
"""
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Annotated, Any, NamedTuple

import msgspec

from mpi_impl.runtime.files import LARGEST, is_there, read_bytes, reading
from mpi_impl.runtime.formats import read_json, sentence
from mpi_impl.runtime.pickles import read_pickle
from reference.errors import UserError

LIBRARY = re.compile(r"site-packages|dist-packages|[/\\]torch[/\\]")
P2P = re.compile(r"(send|recv)\s+(\d{1,9})(?:->|<-)(\d{1,9})")
END_OF_BATCH = re.compile(r"([A-Z_]+_)?coalesced")

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


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
    line: Number = 0

    def __str__(self) -> str:
        return f"{os.path.basename(self.filename)}:{self.line}"


@dataclass
class Entry:
    """A collective, a message to one other rank, or a batch of them, as its rank has posted it."""

    record_id: Number
    process_group: tuple[str, str]          # its name, and a description
    profiling_name: str                     # nccl:all_reduce; nccl:send 0->1, which are ranks of the group
    state: str                              # scheduled, started or completed
    collective_seq_id: Number = 0           # counts the collectives of its group, from the start of the job
    p2p_seq_id: Number = 0                  # counts single messages and batches of this rank alone
    is_p2p: bool = False
    input_sizes: list[list[Number]] = field(default_factory=list)
    output_sizes: list[list[Number]] = field(default_factory=list)
    input_dtypes: list[str] = field(default_factory=list)
    time_discovered_completed_ns: Number | None = None
    retired: bool = False
    frames: list[Frame] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts: list[Entry] = []        # of a batch

    @property
    def has_ended(self) -> bool:
        """Report whether it has ended. NCCL also retires what failed; gloo never sets another mark."""
        return (self.state == "completed" or bool(self.time_discovered_completed_ns)
                or self.retired and self.profiling_name.startswith("gloo:"))

    @cached_property
    def operation(self) -> str:
        """Return all_reduce of nccl:all_reduce."""
        return self.profiling_name.partition(":")[2] or self.profiling_name

    @cached_property
    def messages(self) -> list[tuple[Any, ...]]:
        """Return ("send", its sender, its receiver) of each message, and likewise of receives."""
        matches = [P2P.fullmatch(part.operation) for part in self.parts or [self]]
        return [(match[1], *map(int, match.group(2, 3)[::1 if match[1] == "send" else -1]))
                for match in matches if match]

    @cached_property
    def signature(self) -> tuple:
        """Return what all ranks must have in common: the operation, and the elements where they are as many on all.

        It is () where the entry does not tell: of a batch whose parts were not recorded.
        """
        if self.parts:
            return tuple(part.signature for part in self.parts)
        if END_OF_BATCH.fullmatch(self.operation):
            return ()
        if self.operation.startswith(("all_to_all", "alltoall", "gather", "scatter", "barrier")):
            return (self.operation,)
        return (self.operation, tuple(map(prod, self.input_sizes)), tuple(self.input_dtypes))

    @property
    def place(self) -> str:
        """Return the program's own line, which is the first that is not in a library's folder."""
        own = next((one for one in self.frames if not LIBRARY.search(one.filename)), None)
        return f" at {own}" if own else ""

    def __str__(self) -> str:
        if self.messages:
            return f"batch of {len(self.messages)} sends and receives" if self.parts else self.operation
        sizes = ", ".join(str(size) for one in self.parts or [self] for size in one.input_sizes or one.output_sizes)
        return f"{self.operation}{f' of {sizes}' if sizes else ''}"


@dataclass
class Config:
    """A process group, as a dump lists it."""

    name: str = ""
    ranks: str | list[Number] = ""          # "[0, 1]", or the list


@dataclass
class Content:
    """The part of a dump that is used."""

    entries: list[Entry]
    pg_config: dict[str, Config] = field(default_factory=dict)      # by the group's name


@dataclass
class Dump:
    """The entries of a rank, in the order in which it posted them."""

    rank: int
    entries: list[Entry]
    groups: dict[str, tuple[int, ...]]      # the ranks of each group, by its name


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
            with reading(path):
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
        raise UserError(f"{path} has no line of PyTorch's watchdog, and does not say whose dump it is: its name must "
                        "end in the rank, as that of comm_lib_trace_rank_0 does.")
    return int(found[1])


def read(path: str, rank: int) -> Dump:
    """Read a dump, a pickle or JSON. Raises UserError."""
    if read_bytes(path, LARGEST)[:1] in (b"{", b"["):
        content = read_json(path, Content, LARGEST)
    else:
        try:
            content = msgspec.convert(read_pickle(path), Content, strict=False)
        except msgspec.ValidationError as error:
            raise UserError(f"{path} is not a dump of PyTorch's flight recorder: {sentence(error)}.") from error
    groups = {config.name or name: tuple(map(int, re.findall(r"\d{1,9}", str(config.ranks))))
              for name, config in content.pg_config.items()}
    return Dump(rank, joined(sorted(content.entries, key=lambda entry: entry.record_id)), groups)


def joined(entries: Sequence[Entry]) -> list[Entry]:
    """Move the parts of each batch into the entry that ends it.

    NCCL runs a batch of messages or collectives as one. Its parts stay "scheduled"; the last entry, "coalesced", has no
    sizes, but is marked when the batch has ended. All have the same numbers, which no other entry has.
    """
    same: dict[tuple, list[Entry]] = defaultdict(list)
    for entry in entries:
        same[entry.process_group, entry.collective_seq_id, entry.p2p_seq_id].append(entry)
    for *parts, last in same.values():
        if parts and END_OF_BATCH.fullmatch(last.operation):
            last.parts, last.record_id = parts, parts[0].record_id
    return [entry for run in same.values() for entry in (run[-1:] if run[-1].parts else run)]
