"""A recorder of the first steps of a run: in memory, and with --record on disk."""
import json
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mpi_impl.comm.clock import TickingClock
from mpi_impl.comm.ledger import Entry
from mpi_impl.comm.trace import Slice
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.arrays import to_host, widened
from mpi_impl.runtime.files import check_folder, replacing, write_whole, writing
from mpi_impl.runtime.tables import bytes_of
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from shardlab.compare.names import Key
from shardlab.compare.observer import Observer
from shardlab.compare.recording import INDEX, STEPS, RunFacts, TensorPart
from shardlab.compare.steps import Call, RankStep, SeenPart
from shardlab.report.timelines.tracing import TracedSteps

ITERATIONS = 2      # to record: in the first, biases are 0 and the optimizer has no state


class Recorder(Observer):
    """An observer that keeps a copy of every part of a tensor that its rank sees in a step."""

    def __init__(self, state: ModelState):
        super().__init__(state)
        self.seen: dict[tuple[Key, tuple[int, ...]], tuple[TensorPart, Any]] = {}
        self.clock, self.slices, self.calls = TickingClock(), list[Slice](), list[Call]()    # of a played step
        self.times: dict[tuple[str, str, tuple[int, ...]], float] = {}

    @contextmanager
    def playing(self):
        """Trace the step in the `with` block on a ticking clock, and note the order of its calls and tensors.

        All ranks call this together.
        """
        self.calls, self.times = [], {}
        traced, ledger = TracedSteps(self.topology, self.clock), self.topology.world.ledger
        ledger.listener = self.hear
        try:
            with traced.step():
                yield
        finally:
            ledger.listener = None
        self.slices = traced.steps[-1]

    def hear(self, entry: Entry, elements: int) -> None:
        """Note a call. A group of one rank sends nothing."""
        if entry.group_size > 1:
            self.calls.append(Call(self.clock.now(), self.action, self.unit, entry, elements))

    @property
    def played(self) -> RankStep:
        """Return the last step that was played."""
        return RankStep(self.slices, self.calls, [SeenPart(at, *part) for part, at in self.times.items()])

    def see(self, phase, name, x, first, summed=False) -> None:
        """Keep a copy. A tensor that is seen again has changed, and replaces the earlier copy."""
        if not x.size:      # a shard of padding
            return
        values = np.copy(widened(to_host(x)))
        part = TensorPart(self.topology.world.rank, first, values.shape, summed)
        self.clock.tick()
        self.times[phase, name, first] = self.clock.now()
        self.seen[Key(self.iteration, phase, name), first] = part, values

    def pop_parts(self) -> list[tuple[Key, TensorPart, Any]]:
        """Return the parts seen since the last call, and forget them."""
        found = [(key, part, values) for (key, _), (part, values) in self.seen.items()]
        self.seen = {}
        return found


class RecordedSteps:
    """The recording of a run's first steps to a folder, for --record. All ranks call its methods together."""

    def __init__(self, state: ModelState, folder: str, about: RunFacts, say: Callable[[str], None]):
        """Raise UserError if nothing can be written there."""
        self.recorder, self.world = Recorder(state), state.topology.world
        self.folder, self.about, self.say, self.left = folder, about, say, ITERATIONS
        self.index: list = []
        self.steps: dict[int, list[RankStep]] = {}
        self.world.broadcast_object(self.begin)

    def begin(self) -> None:
        """Invalidate an earlier recording in the folder, so that two runs do not mix."""
        check_folder(self.folder)
        with writing(self.folder):
            for name in (INDEX, STEPS):
                if os.path.exists(path := os.path.join(self.folder, name)):
                    os.remove(path)

    @property
    def observer(self) -> Recorder | None:
        """Return the observer of the next step: None, once there are enough."""
        return self.recorder if self.left else None

    def playing(self):
        """Return the context in which the next step is noted in order, if it is recorded."""
        return self.recorder.playing() if self.left else nullcontext()

    def write(self) -> None:
        """Write the step, if it was observed, and report its size."""
        if not self.left:
            return
        parts, rank = self.recorder.pop_parts(), self.world.rank
        self.left -= 1
        bytes_of_ranks = self.world.allgather_objects(sum(values.nbytes for _, _, values in parts))
        file = f"iteration-{self.recorder.iteration}.rank-{rank}.safetensors"
        self.world.broadcast_object(lambda: self.check_room(sum(bytes_of_ranks)))
        self.world.collect_objects(lambda: write_values(os.path.join(self.folder, file), parts))
        self.index += [(key, part._replace(file=file, name=str(i))) for i, (key, part, _) in enumerate(parts)]
        everyone, played = self.world.allgather_objects(self.index), self.world.allgather_objects(self.recorder.played)
        self.steps[self.recorder.iteration] = played
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
        index = {"about": asdict(self.about), "parts": [entry for index in everyone for entry in index]}
        if all(one.slices for one in self.steps[self.recorder.iteration]):
            write_whole(os.path.join(self.folder, STEPS), json.dumps(self.steps))
        write_whole(os.path.join(self.folder, INDEX), json.dumps(index))


def write_values(path: str, parts: list[tuple[Key, TensorPart, Any]]) -> None:
    """Write each part's values, under its number. Raise UserError if that fails."""
    try:
        with replacing(path) as aside:
            save_file({str(i): values for i, (_, _, values) in enumerate(parts)}, aside)
    except SafetensorError as error:
        raise UserError(f"{path} cannot be written: {error}.") from error


def facts_of(state: ModelState, optimizer: OptimizerConfig, global_batch_size: int, seq_length: int) -> RunFacts:
    """Return the description of a run."""
    return RunFacts(state.model, optimizer, state.seed, global_batch_size, seq_length, state.precision.compute,
                    state.topology.config)
