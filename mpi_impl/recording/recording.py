"""Recordings: the tensors of a run's first steps, each part with its place in the whole tensor; in memory and on disk.

A recording on disk is a folder (`pretrain_gpt --record DIR`) with `recording.json`, which tells what was run and lists
the parts, and with a safetensors file for each rank and iteration, which holds their values. The list is written after
the values: a folder without one is no recording. Formats of two bytes are stored as float32.
"""
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from mpi_impl.recording.names import PHASES, Key, place_of
from reference.errors import UserError

INDEX = "recording.json"
ALIKE = ("model", "optimizer", "seed", "global batch size", "sequence length")     # in runs that can be compared


class Part(NamedTuple):
    """What one rank holds of a tensor: a box of the whole."""

    rank: int
    first: tuple[int, ...]     # coordinates, in the whole, of its first element
    shape: tuple[int, ...]
    summed: bool               # the whole is the sum of such parts, rather than made up of them
    file: str = ""             # where its values are, on disk, and under which name
    name: str = ""

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.first, self.shape))


@dataclass
class Recording:
    """The parts of each tensor, and how to get at their values."""

    about: dict[str, Any]                  # what was run, as recorder.description tells
    load: Callable[[Part], Any]            # -> the part's values, a NumPy array
    parts: dict[Key, list[Part]] = field(default_factory=dict)

    @cached_property
    def first_iteration(self) -> int:
        return min(key.iteration for key in self.parts)


def in_memory(about: dict[str, Any], taken: Iterable[tuple[Key, Part, Any]]) -> Recording:
    """A recording of what all ranks' recorders have taken."""
    recording, values = Recording(about, lambda part: values[part]), {}
    for i, (key, part, x) in enumerate(taken):
        part = part._replace(name=str(i))
        values[part] = x
        recording.parts.setdefault(key, []).append(part)
    return recording


def read(folder: str) -> Recording:
    """Raises UserError for a folder that holds no recording."""
    path = os.path.join(folder, INDEX)
    try:
        with open(path) as file:
            found = json.load(file)
        recording = Recording(found["about"], lambda part: load(folder, part))
        if not set(ALIKE) < set(recording.about):
            raise ValueError
        for iteration, phase, name, rank, first, shape, summed, file_name, entry in found["parts"]:
            key, part = Key(iteration, phase, name), Part(rank, tuple(first), tuple(shape), summed, file_name, entry)
            if phase not in PHASES:
                raise ValueError
            place_of(name)      # raises ValueError for a name that no tensor has
            recording.parts.setdefault(key, []).append(part)
    except OSError as error:
        raise UserError(f"{folder} holds no recording: {path} cannot be read ({error.strerror}). A recording is a "
                        "folder that `pretrain_gpt --record` has written to its end.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{folder} holds no recording: {path} is not what `pretrain_gpt --record` writes.") from error
    return recording


def load(folder: str, part: Part):
    """A part's values, from disk."""
    path = os.path.join(folder, part.file)
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
