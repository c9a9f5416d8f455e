"""The speed of saving and loading a checkpoint, beside safetensors' own writer and reader.

    for n in 1 2 4; do .venv/bin/python -m mpi_impl.launch -n $n benchmarks/checkpoints.py; done

The ranks hold a GPT of 55 million parameters, sharded by tensor parallelism, with Adam's moments: 666 MB in all. All
contenders save or load these arrays, in a file for each state of a rank. "shardlab" is what the trainer calls, with all
that it checks; "save_file" and "load_file" are functions of `safetensors.numpy`, called once for each file. `save_file`
returns before anything is on the disk, so both savings run with and without `os.fsync`. The contenders "and checks" do
with safetensors what shardlab does: they test that all numbers are finite, and store or compare checksums.

The contenders take turns on the same ranks. Before each saving its old files are removed, and all that waits for the
disk is written; what is loaded is in the page cache. A time is that of the slowest rank.
"""
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from statistics import median
from unittest import mock

import numpy as np
import xxhash
from models import gpt, trainer_of
from programs import parse, parser_of
from safetensors.numpy import load_file, save_file

from mpi_impl.checkpoints import checkpoint, on_disk
from mpi_impl.checkpoints.manifest import file_of, key_of
from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import connect
from mpi_impl.launch.entry import run
from mpi_impl.runtime.files import writing
from mpi_impl.training.trainer import Trainer
from reference.config import ParallelConfig
from reference.parallel.boxes import shape_of

MODEL = gpt(L=6, h=768, a=12, V=16384, s=512)


class Safetensors:
    """The calls of a user of safetensors, for the arrays that this rank saves."""

    def __init__(self, trainer: Trainer, folder: str):
        self.files = {os.path.join(folder, file_of(state, trainer.topology.world.rank)):
                      {key_of(name, box): buffer.load(piece).reshape(shape_of(box))
                       for piece, (name, box) in zip(*checkpoint.boxes_to_save(trainer, state), strict=True)}
                      for state, buffer in trainer.state.optimizer_states.items()}
        self.bytes = sum(array.nbytes for arrays in self.files.values() for array in arrays.values())
        self.checksums: dict[str, str] = {}

    def save(self, fsync: bool, checks: bool = False) -> None:
        for path, arrays in self.files.items():
            assert not checks or all(np.isfinite(array).all() for array in arrays.values())
            save_file(arrays, path)
            with open(path, "rb") as file:
                if checks:
                    self.checksums[path] = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
                if fsync:
                    os.fsync(file.fileno())

    def load(self, checks: bool = False) -> None:
        for path in self.files:
            if checks:
                with open(path, "rb") as file:
                    assert hashlib.file_digest(file, xxhash.xxh3_128).hexdigest() == self.checksums[path]
            load_file(path)


class Rivals:
    """The contenders on this rank, and a folder for the files of each side."""

    def __init__(self, ranks: Group, folder: str):
        self.ranks, self.ours, self.theirs = ranks, os.path.join(folder, "ours"), os.path.join(folder, "theirs")
        topology = connect(ranks, ParallelConfig(tensor_model_parallel_size=ranks.size))
        self.trainer = trainer_of(MODEL, topology)
        self.safetensors = Safetensors(self.trainer, self.theirs)

    def save(self) -> None:
        checkpoint.save(self.trainer, self.ours, {})

    def save_without_fsync(self) -> None:
        with mock.patch.object(os, "fsync"):
            self.save()

    def load(self) -> None:
        checkpoint.load(self.trainer, self.ours, on_disk.read_manifest(self.ours))

    def take_turn(self) -> dict[str, float]:
        """Return the seconds of each contender."""
        them = self.safetensors
        return {"save: shardlab, fsync": self.saving(self.save, self.ours),
                "save: save_file, fsync": self.saving(lambda: them.save(fsync=True), self.theirs),
                "save: shardlab": self.saving(self.save_without_fsync, self.ours),
                "save: save_file": self.saving(lambda: them.save(fsync=False), self.theirs),
                "save: save_file, fsync and checks": self.saving(lambda: them.save(True, True), self.theirs),
                "load: shardlab": self.seconds(self.load),
                "load: load_file": self.seconds(them.load),
                "load: load_file and checks": self.seconds(lambda: them.load(checks=True))}

    def saving(self, save: Callable[[], object], folder: str) -> float:
        """Return the seconds of saving into an empty folder, while the disk has nothing else to do for us."""
        self.ranks.broadcast_object(lambda: empty(folder))
        return self.seconds(save)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of the slowest rank."""
        self.ranks.allgather_objects(None)
        began = time.perf_counter()
        work()
        return max(self.ranks.allgather_objects(time.perf_counter() - began))


def empty(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    os.sync()


def make_folder(inside: str) -> str:
    """Make a folder for the checkpoints. Raises UserError if that fails."""
    with writing(inside):
        return tempfile.mkdtemp(dir=inside, prefix="checkpoints-")


def main() -> None:
    ranks, parser = world(), parser_of("checkpoints", __doc__)
    parser.add_argument("--folder", default=".", help="on the disk that is written to (default: the current folder)")
    options = parse(parser, turns=(7, "of each contender"))
    folder = ranks.broadcast_object(lambda: make_folder(options.folder))
    try:
        rivals = Rivals(ranks, folder)
        turns = [rivals.take_turn() for _ in range(1 + options.turns)][1:]      # the first one is to warm up
        size = sum(ranks.allgather_objects(rivals.safetensors.bytes)) / 1e6
    finally:
        ranks.broadcast_object(lambda: shutil.rmtree(folder))
    if ranks.rank == 0:
        print(f"{ranks.size} ranks, {size:,.0f} MB; medians of {options.turns} turns, taken in turn")
        for name in turns[0]:
            print(f"{name:34} {size / median(turn[name] for turn in turns):>6,.0f} MB/s")


if __name__ == "__main__":
    run(main)
