"""Recordings, in memory and on disk: the tensors of a run's first steps, each part with its place in the whole tensor.

A recording on disk is a folder (`pretrain_gpt --record DIR`) with `recording.json`, which describes the run and lists
the parts, and with a safetensors file for each rank and iteration, which holds their values. The list is written after
the values: a folder without one is not a recording. 16-bit formats are stored as float32.
"""
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from msgspec import Meta
from safetensors import SafetensorError, safe_open

from mpi_impl.runtime.files import LARGEST, check_readable, is_there, path_inside
from mpi_impl.runtime.formats import read_json, sentence
from reference.config import ModelConfig, ParallelConfig
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from reference.precision import FORMATS
from shardlab.compare.names import PHASES, Key, place_of
from shardlab.compare.steps import RankStep

INDEX, STEPS = "recording.json", "steps.json"
COMMON = ("model", "optimizer", "seed", "global_batch_size", "sequence_length")     # of runs to compare
Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class TensorPart(NamedTuple):
    """One rank's box of a tensor."""

    rank: Count
    first: tuple[Count, ...]     # coordinates, in the whole, of its first element
    shape: tuple[Count, ...]
    summed: bool                 # whether the whole is the sum of the parts, not their union
    file: str = ""               # the file with its values, and its name there
    name: str = ""

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.first, self.shape))


@dataclass(frozen=True)
class RunFacts:
    """The description of a run."""

    model: ModelConfig
    optimizer: OptimizerConfig
    seed: int
    global_batch_size: int
    sequence_length: int
    format: str                # in which the model computes
    parallel: ParallelConfig

    def __post_init__(self):
        if self.format not in FORMATS:
            raise ValueError(f"there is no format {self.format}")


@dataclass
class Index:
    """The content of recording.json."""

    about: RunFacts
    parts: list[tuple[Key, TensorPart]]


def whole_shape(parts: Iterable) -> tuple[int, ...]:
    """Return the shape of the smallest array that holds the boxes of all parts."""
    return tuple(max(along.stop for along in axis) for axis in zip(*(part.box for part in parts)))


@dataclass
class Recording:
    """The parts of each tensor, and a function that loads their values."""

    about: RunFacts
    load: Callable[[TensorPart], Any]      # -> the part's values, a NumPy array
    parts: dict[Key, list[TensorPart]] = field(default_factory=dict)
    load_steps: Callable[[], dict[int, list[RankStep]]] = dict

    @cached_property
    def steps(self) -> dict[int, list[RankStep]]:
        """Return what each rank did, by iteration. Raise UserError if that was not recorded."""
        return self.load_steps()

    @cached_property
    def first_iteration(self) -> int:
        return min(key.iteration for key in self.parts)


def in_memory(about: RunFacts, parts: Iterable[tuple[Key, TensorPart, Any]],
              steps: dict[int, list[RankStep]] | None = None) -> Recording:
    """Make a recording of all ranks' recorders."""
    recording, values = Recording(about, lambda part: values[part], load_steps=lambda: steps or {}), {}
    for i, (key, part, x) in enumerate(parts):
        part = part._replace(name=str(i))
        values[part] = x
        recording.parts.setdefault(key, []).append(part)
    return recording


def read(folder: str) -> Recording:
    """Read a recording. Raise UserError for a folder that holds none, or one that makes no sense."""
    path = os.path.join(folder, INDEX)
    if not is_there(path):
        raise UserError(f"{folder} holds no recording: {path} is not there. A recording is a folder that `pretrain_gpt "
                        "--record` has written to its end, or shardlab_recorder.py to the end of a step.")
    found = read_json(path, Index, LARGEST)
    recording = Recording(found.about, lambda part: load(folder, part), load_steps=lambda: read_steps(folder))
    try:
        for key, part in found.parts:
            if key.phase not in PHASES or len(part.first) != len(part.shape):
                raise ValueError(f"{key} is not a part of a tensor")
            place_of(key.name)      # raises ValueError for a name that no tensor has
            recording.parts.setdefault(key, []).append(part)
    except ValueError as error:
        raise UserError(f"{path} is not what `pretrain_gpt --record` writes: {sentence(error)}.") from error
    if not recording.parts:
        raise UserError(f"{path} lists no tensor: the run was ended before its first iteration. Record it again.")
    return recording


def read_steps(folder: str) -> dict[int, list[RankStep]]:
    """Read what each rank did in the recorded steps, in order. Raise UserError if that was not recorded."""
    path = os.path.join(folder, STEPS)
    if not is_there(path):
        raise UserError(f"{folder} lacks the order in which its ranks worked: {path} is not there. It was recorded "
                        "with --trace or --report, or by an older version. Record the run again, without them.")
    return read_json(path, dict[int, list[RankStep]], LARGEST)


def load(folder: str, part: TensorPart):
    """Read a part's values from disk."""
    path = path_inside(folder, part.file, INDEX)
    check_readable(path)
    try:
        with safe_open(path, "numpy") as file:
            values = file.get_tensor(part.name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read, or is not what `pretrain_gpt --record` has written: {error}. Record "
                        "the run again.") from error
    if values.shape != part.shape:
        raise UserError(f"{path} holds {part.name} in the shape {values.shape}, where {INDEX} says {part.shape}. "
                        "Record the run again.")
    return values
