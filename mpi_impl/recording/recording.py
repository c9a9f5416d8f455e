"""Recordings: the tensors of a run's first steps, each part with its place in the whole tensor; in memory and on disk.

A recording on disk is a folder (`pretrain_gpt --record DIR`) with `recording.json`, which tells what was run and lists
the parts, and with a safetensors file for each rank and iteration, which holds their values. The list is written after
the values: a folder without one is no recording. Formats of two bytes are stored as float32.
"""
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mpi_impl.comm.group import to_host
from mpi_impl.files import check_folder, writing
from mpi_impl.kernels.formats import widened
from mpi_impl.recording.names import PHASES, Key
from mpi_impl.recording.observer import Observer
from mpi_impl.training.trainer import Trainer
from reference.errors import UserError

INDEX = "recording.json"
ALIKE = ("model", "optimizer", "seed", "global batch size", "sequence length")     # in runs that can be compared
ITERATIONS = 2      # that are recorded: in the first biases are 0 still, and the optimizer has no past


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

    about: dict[str, Any]                  # what was run, as `description` tells
    load: Callable[[Part], Any]            # -> the part's values, a NumPy array
    parts: dict[Key, list[Part]] = field(default_factory=dict)

    @cached_property
    def first_iteration(self) -> int:
        return min(key.iteration for key in self.parts)


# ---- made -----------------------------------------------------------------------------------------------------------


class Recorder(Observer):
    """Keeps a copy of every part of a tensor that its rank sees in a step."""

    def __init__(self, trainer: Trainer):
        super().__init__(trainer)
        self.seen: dict[tuple[Key, tuple[int, ...]], tuple[Part, Any]] = {}

    def see(self, phase, name, x, first, summed=False) -> None:
        """What is seen again has changed since, and replaces what was seen before."""
        if not x.size:      # a shard of padding
            return
        values = np.array(widened(to_host(x)))
        part = Part(self.trainer.topology.world.rank, first, values.shape, summed)
        self.seen[Key(self.iteration, phase, name), first] = part, values

    def taken(self) -> list[tuple[Key, Part, Any]]:
        """What was seen since this was last asked."""
        found = [(key, part, values) for (key, _), (part, values) in self.seen.items()]
        self.seen = {}
        return found


def description(trainer: Trainer, global_batch_size: int, seq_length: int) -> dict[str, Any]:
    """What was run: what must be alike in two runs that are compared; and the rest, for a person."""
    alike = (asdict(trainer.model), asdict(trainer.optimizer.config), trainer.seed, global_batch_size, seq_length)
    return {**dict(zip(ALIKE, alike)), "format": trainer.precision.compute, "parallel": asdict(trainer.topology.config)}


def in_memory(about: dict[str, Any], taken: Iterable[tuple[Key, Part, Any]]) -> Recording:
    """A recording of what all ranks' recorders have taken."""
    recording, values = Recording(about, lambda part: values[part]), {}
    for i, (key, part, x) in enumerate(taken):
        part = part._replace(name=str(i))
        values[part] = x
        recording.parts.setdefault(key, []).append(part)
    return recording


# ---- on disk --------------------------------------------------------------------------------------------------------


class RecordedSteps:
    """--record: the first steps of a run, written to a folder. Its methods are called by all ranks together."""

    def __init__(self, trainer: Trainer, folder: str, about: dict[str, Any], say: Callable[[str], None]):
        """Raises UserError if nothing can be written there."""
        self.recorder, self.world = Recorder(trainer), trainer.topology.world
        self.folder, self.about, self.say, self.left = folder, about, say, ITERATIONS
        self.index: list = []
        self.world.from_first(self.begin)

    def begin(self) -> None:
        """What was recorded there before is no recording any more, so that two runs do not mix."""
        check_folder(self.folder)
        with writing(self.folder):
            if os.path.exists(path := os.path.join(self.folder, INDEX)):
                os.remove(path)

    @property
    def observer(self) -> Recorder | None:
        """Who observes the next step: nobody, once there is enough."""
        return self.recorder if self.left else None

    def write(self) -> None:
        """After a step: if it was observed, tell how much it is, and write it."""
        if not self.left:
            return
        taken, rank = self.recorder.taken(), self.world.rank
        self.left -= 1
        bytes_of_ranks = self.world.from_all(sum(values.nbytes for _, _, values in taken))
        file = f"iteration-{self.recorder.iteration}.rank-{rank}.safetensors"
        self.world.from_first(lambda: self.check_room(sum(bytes_of_ranks)))
        with writing(os.path.join(self.folder, file)):
            save_file({str(i): values for i, (_, _, values) in enumerate(taken)}, os.path.join(self.folder, file))
        self.index += [[*key, *part._replace(file=file, name=str(i))] for i, (key, part, _) in enumerate(taken)]
        everyone = self.world.from_all(self.index)
        self.world.from_first(lambda: self.write_index(everyone))

    def check_room(self, size: int) -> None:
        self.say(f"recording iteration {self.recorder.iteration}: {size / 1e6:,.1f} MB, in {self.folder}")
        with writing(self.folder):
            free = shutil.disk_usage(self.folder).free
        if size > free:
            raise UserError(f"--record: iteration {self.recorder.iteration} takes {size / 1e6:,.0f} MB, but in "
                            f"{self.folder} {free / 1e6:,.0f} MB are free. Record a smaller model or batch, or "
                            "elsewhere.")

    def write_index(self, everyone: list[list]) -> None:
        with writing(path := os.path.join(self.folder, INDEX)), open(path, "w") as file:
            json.dump({"about": self.about, "parts": [entry for index in everyone for entry in index]}, file)


def read(folder: str) -> Recording:
    """Raises UserError for a folder that holds no recording."""
    path = os.path.join(folder, INDEX)
    try:
        with open(path) as file:
            found = json.load(file)
        recording = Recording(found["about"], lambda part: load(folder, part))
        assert set(ALIKE) < set(recording.about)
        for iteration, phase, name, rank, first, shape, summed, file_name, entry in found["parts"]:
            key, part = Key(iteration, phase, name), Part(rank, tuple(first), tuple(shape), summed, file_name, entry)
            assert phase in PHASES and key.order
            recording.parts.setdefault(key, []).append(part)
    except OSError as error:
        raise UserError(f"{folder} holds no recording: {path} cannot be read ({error.strerror}). A recording is a "
                        "folder that `pretrain_gpt --record` has written to its end.") from error
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
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
