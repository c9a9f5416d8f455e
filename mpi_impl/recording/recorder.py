"""Records the first steps of a run: in memory, and with --record on disk."""
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mpi_impl.recording.names import Key
from mpi_impl.recording.observer import Observer
from mpi_impl.recording.recording import ALIKE, INDEX, Part
from mpi_impl.runtime.arrays import to_host, widened
from mpi_impl.runtime.files import check_folder, write_whole, writing
from mpi_impl.runtime.tables import bytes_of
from reference.errors import UserError

ITERATIONS = 2      # that are recorded: in the first biases are 0 still, and the optimizer has no past


class Recorder(Observer):
    """Keeps a copy of every part of a tensor that its rank sees in a step."""

    def __init__(self, trainer):
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


class RecordedSteps:
    """--record: the first steps of a run, written to a folder. Its methods are called by all ranks together."""

    def __init__(self, trainer, folder: str, about: dict[str, Any], say: Callable[[str], None]):
        """Raises UserError if nothing can be written there."""
        self.recorder, self.world = Recorder(trainer), trainer.topology.world
        self.folder, self.about, self.say, self.left = folder, about, say, ITERATIONS
        self.index: list = []
        self.world.broadcast_object(self.begin)

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
        bytes_of_ranks = self.world.allgather_objects(sum(values.nbytes for _, _, values in taken))
        file = f"iteration-{self.recorder.iteration}.rank-{rank}.safetensors"
        self.world.broadcast_object(lambda: self.check_room(sum(bytes_of_ranks)))
        self.world.collect_objects(lambda: write_values(os.path.join(self.folder, file), taken))
        self.index += [[*key, *part._replace(file=file, name=str(i))] for i, (key, part, _) in enumerate(taken)]
        everyone = self.world.allgather_objects(self.index)
        self.world.broadcast_object(lambda: self.write_index(everyone))

    def check_room(self, size: int) -> None:
        self.say(f"recording iteration {self.recorder.iteration}: {bytes_of(size)}, in {self.folder}")
        with writing(self.folder):
            free = shutil.disk_usage(self.folder).free
        if size > free:
            raise UserError(f"--record: iteration {self.recorder.iteration} takes {bytes_of(size)}, but in "
                            f"{self.folder} {bytes_of(free)} are free. Record a smaller model or batch, or "
                            "elsewhere.")

    def write_index(self, everyone: list[list]) -> None:
        index = {"about": self.about, "parts": [entry for index in everyone for entry in index]}
        write_whole(os.path.join(self.folder, INDEX), json.dumps(index))


def write_values(path: str, taken: list[tuple[Key, Part, Any]]) -> None:
    """Each part's, under its number. Raises UserError."""
    try:
        save_file({str(i): values for i, (_, _, values) in enumerate(taken)}, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {error}.") from error


def description(trainer, global_batch_size: int, seq_length: int) -> dict[str, Any]:
    """What was run: what must be alike in two runs that are compared; and the rest, for a person."""
    alike = (asdict(trainer.model), asdict(trainer.optimizer.config), trainer.seed, global_batch_size, seq_length)
    return {**dict(zip(ALIKE, alike)), "format": trainer.precision.compute, "parallel": asdict(trainer.topology.config)}
