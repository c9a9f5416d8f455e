"""Weights in Hugging Face's layout, in and out: model.safetensors, read by ranks and written from ranks.

Nothing is ever unpickled, and no rank ever holds more of the model than its own part and one tensor. Where each tensor
is in the files, and how it lies there, gpt2_layout.py and bert_layout.py say.
`transformers` is not needed for any of this. The tests prove against it that both compute the same.
"""
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from tempfile import TemporaryDirectory

import numpy as np

from mpi_impl.checkpoints.huggingface_config import CONFIG, config_of, layout_in, layout_of, read_config
from mpi_impl.checkpoints.huggingface_layout import Place
from mpi_impl.checkpoints.huggingface_tokenizer import save_tokenizer
from mpi_impl.checkpoints.on_disk import write_tensors
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.runtime.arrays import moved_to
from mpi_impl.runtime.files import LARGEST, path_inside, writing
from mpi_impl.runtime.formats import open_tensors, read_json
from mpi_impl.training.trainer import Trainer
from reference.config import ARCHITECTURES, ModelConfig
from reference.errors import UserError
from reference.models.model import model_tensors
from reference.parallel.layout import Piece, Segment
from reference.params import Tensor, leaves

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"       # which of several files has a tensor
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
READ = ("F64", "F32", "F16", "BF16")         # formats, as a file names them
ROWS = 1024                                  # of two tables that are compared, at a time
OLD_NAMES = {"gamma": "weight", "beta": "bias"}      # of a LayerNorm, as the first published BERTs have them
NEW = ("pooler.", "multichoice_head.")       # what a model that is to choose may begin with, as no file has it yet


def places_of(model: ModelConfig) -> Iterator[tuple[str, Tensor, list[Place]]]:
    """Each tensor of ours, by name, and its places in the files."""
    layout = layout_of(model)
    for name, tensor in leaves(model_tensors(model)):
        yield name, tensor, layout.places(name, tensor, model.num_layers)


# ---- in -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightIndex:
    """What the index of several files says."""

    weight_map: dict[str, str]       # from the names of tensors to those of files


class Weights:
    """The tensors in a folder, by their names without the prefix, in one file or in several with an index."""

    def __init__(self, folder: str):
        """Opens all files. Raises UserError if one is missing, or damaged."""
        self.folder, (self.layout, _) = folder, layout_in(folder)
        self.num_layers = read_config(folder, self.layout.architecture)[self.layout.same["num_layers"]]
        self.found = {}                          # name -> the file's path, the open file, the name there
        for path in self.paths():
            file = open_tensors(path)
            for name in file.keys():                             # noqa: SIM118 - it is no dict
                self.found[self.short_name(name)] = path, file, name
        if self.num_layers > len(self.found):    # before as many are declared as it says
            raise UserError(f"{os.path.join(folder, CONFIG)} asks for {self.num_layers:,} layers, but {self.files()} "
                            f"has {len(self.found):,} tensors in all. Give the files of one model.")

    def short_name(self, name: str) -> str:
        """Without the prefix, and as it is called today."""
        name = name.removeprefix(self.layout.prefix)
        return re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda old: OLD_NAMES[old[0]], name)

    def paths(self) -> list[str]:
        """The files: the one, or those that the index names."""
        one, index = (os.path.join(self.folder, name) for name in (WEIGHTS, INDEX))
        if os.path.isfile(one):
            return [one]
        if os.path.isfile(index):
            names = read_json(index, WeightIndex, LARGEST).weight_map
            return [path_inside(self.folder, name, index) for name in sorted(set(names.values()))]
        for name in PICKLES:
            if os.path.isfile(os.path.join(self.folder, name)):
                raise UserError(f"{os.path.join(self.folder, name)} is a pickle, which is never opened: it could run "
                                "any program. Convert it, where you trust it, with transformers: "
                                f"{next(iter(self.layout.classes.values()))}.from_pretrained({self.folder!r})."
                                f"save_pretrained(...) writes {WEIGHTS}.")
        raise UserError(f"--load-hf {self.folder} has no {WEIGHTS}, nor a {INDEX}. Give the folder of a model that "
                        "transformers has saved.")

    def slice(self, name: str):
        """A tensor of which nothing has been read yet but its shape and format."""
        _, file, full_name = self.found[name]
        return file.get_slice(full_name)

    def check(self, model: ModelConfig) -> None:
        """Raises UserError unless these are the model's tensors, of the right shapes, and no others than `extra`."""
        expected, new = set(), NEW if "choice" in model.heads else ()
        for ours, _, places in places_of(model):
            for place in places:
                if place.name in self.found or not ours.startswith(new):
                    self.check_tensor(place)
                expected.add(place.name)
        for name in sorted(self.found.keys() - expected - self.extra(model)):
            raise UserError(f"{self.found[name][0]} has a tensor {name}, for which the model of the folder's {CONFIG} "
                            "has no place.")

    def check_tensor(self, place: Place) -> None:
        """Raises UserError unless it is there, in the right shape and in a format that can be read."""
        name, shape = place.name, list(place.shape)
        if name not in self.found:
            raise UserError(f"--load-hf {self.folder} has no tensor {name} in {self.files()}, but the model has one, "
                            f"{shape}.")
        found, path = self.slice(name), self.found[name][0]
        if found.get_shape() != shape:
            raise UserError(f"{path} has {name} as {found.get_shape()}, but the folder's {CONFIG} asks for {shape}.")
        if found.get_dtype() not in READ:
            raise UserError(f"{path} has {name} in the format {found.get_dtype()}, but it must be one of "
                            f"{', '.join(READ)}.")

    def extra(self, model: ModelConfig) -> set[str]:
        """Tensors that may be passed over: those of heads that the model has not, buffers, and copies of tied ones."""
        twins = self.layout.twins
        heads = {place.name for heads in ARCHITECTURES[model.architecture]
                 for _, _, places in places_of(replace(model, heads=heads)) for place in places}
        buffers = {name for name in self.found if self.layout.buffers.fullmatch(name)}
        copies = {name for name in twins.keys() & self.found.keys() if not model.tied or self.same(name, twins[name])}
        return heads | buffers | copies

    def same(self, one: str, other: str) -> bool:
        """Whether two tables, or biases, are equal, some rows at a time."""
        a, b = self.slice(one), self.slice(other)
        rows = a.get_shape()[0]
        some = [slice(first, min(first + ROWS, rows)) for first in range(0, rows, ROWS)]     # a file has no rows beyond
        return a.get_shape() == b.get_shape() and all(np.array_equal(a[i], b[i]) for i in some)

    def files(self) -> str:
        return WEIGHTS if os.path.isfile(os.path.join(self.folder, WEIGHTS)) else f"the files of {INDEX}"

    def has(self, segment: Segment) -> bool:
        """Whether it is here: all of the model is, but perhaps for a new head."""
        return all(place.name in self.found for place in self.places(segment))

    def places(self, segment: Segment) -> list[Place]:
        return self.layout.places(segment.name, segment.tensor, self.num_layers)

    def shard(self, segment: Segment, rank: int, dtype):
        """What tensor-parallel rank `rank` holds of a tensor, [segment.shape]; padding is 0."""
        x = np.zeros(segment.shape, dtype)
        for place in self.places(segment):
            part, there = place.share(x, rank)
            if part.size:
                part[...] = self.slice(place.name)[there]
        return x


def check_weights(folder: str, model: ModelConfig) -> None:
    """Raises UserError for whatever is wrong with the weights in the folder, before the work."""
    Weights(folder).check(model)


def load_weights(trainer: Trainer, folder: str) -> None:
    """Called by all ranks before the first step: each reads what it owns of the weights. Moments and counters stay 0.

    A head for choices that is not in the files keeps its initial values. Raises UserError, on all ranks alike, if one
    of them cannot read a file.
    """
    trainer.topology.world.collect_objects(lambda: read_pieces(trainer, Weights(folder)))
    trainer.take_over()


def read_pieces(trainer: Trainer, weights: Weights) -> None:
    master = trainer.optimizer.states["parameters"]
    for piece in trainer.pieces:
        if weights.has(piece.of):
            x = weights.shard(piece.of, trainer.topology.tensor.rank, trainer.main.dtype).reshape(-1)
            master.store(piece, moved_to(x[within_segment(piece)], trainer.main))


def within_segment(piece: Piece) -> slice:
    """Where a piece lies in its tensor's shard, flat."""
    return slice(piece.in_buffer.start - piece.of.offset, piece.in_buffer.stop - piece.of.offset)


# ---- out ------------------------------------------------------------------------------------------------------------


def save_model(trainer: Trainer, folder: str, tokenizer: Tokenizer | None) -> None:
    """Write the model to a folder that is there. Called by all ranks; rank 0 gives the tokenizer, the others None.

    Raises UserError, on all ranks alike, if a file cannot be written. What was in the folder is then as it was.
    """
    tensors = gathered(trainer)

    def write() -> None:
        assert tokenizer is not None
        try:
            write_model(folder, trainer, tensors, tokenizer)
        finally:
            exhaust(tensors)             # if not all could be written, the others send them nonetheless

    if tokenizer is None:
        exhaust(tensors)
    trainer.topology.world.broadcast_object(write)


def exhaust(tensors: Iterator) -> None:
    for _ in tensors:
        pass


def write_model(folder: str, trainer: Trainer, tensors: Iterator, tokenizer: Tokenizer) -> None:
    """On rank 0. All files are written aside, and then get their names."""
    with writing(folder), TemporaryDirectory(dir=folder, prefix="unfinished-") as aside:
        write_weights(os.path.join(aside, WEIGHTS), trainer, tensors)
        with open(os.path.join(aside, CONFIG), "w") as file:
            json.dump(config_of(trainer.model, tokenizer, trainer.main.dtype.name), file, indent=2)
        save_tokenizer(aside, tokenizer)
        for name in os.listdir(aside):
            os.replace(os.path.join(aside, name), os.path.join(folder, name))


def write_weights(path: str, trainer: Trainer, tensors: Iterator) -> None:
    """The tensors, one after another, as they come; with the prefix, and as transformers marks its files."""
    full_name = layout_of(trainer.model).full_name
    shapes = {full_name(place.name): place.shape for _, _, places in places_of(trainer.model) for place in places}
    write_tensors(path, trainer.main.dtype.name, shapes, tensors, metadata={"format": "pt"})


def gathered(trainer: Trainer) -> Iterator:
    """On rank 0 the elements of each whole tensor as transformers has it, one after another; on the others nothing.

    All ranks go through it.
    """
    topology, master = trainer.topology, trainer.optimizer.states["parameters"]
    world, t = topology.world, topology.tensor.size
    where = world.allgather_objects([(piece.of.name, topology.place.tensor, within_segment(piece))
                                     for piece in trainer.saved])
    for name, tensor, places in places_of(trainer.model):
        receives = []
        with trainer.ledger.phase("saving"):
            if world.rank == 0:
                shape = tensor.local_shape(t)
                shards = np.empty((t, prod(shape)), trainer.main.dtype)      # of a replicated tensor only the first
                receives = [world.post_receive(shards[part, place], rank, 0, "weights to save")
                            for rank, theirs in enumerate(where) for other, part, place in theirs if other == name]
            for piece in trainer.saved:
                if piece.of.name == name:
                    world.post_send(master.load(piece), 0, 0, "weights to save").wait()
            for receive in receives:
                receive.wait()
        if world.rank == 0:
            some = shards if tensor.split is not None else shards[:1]
            yield from as_theirs([shard.reshape(shape) for shard in some], places)


def as_theirs(shards: list, places: list[Place]) -> Iterator:
    """A tensor's shards -> each of the tensors that it is there, or of which it is all parts."""
    for (_, shape), parts in groupby(places, lambda place: (place.name, place.shape)):
        whole = np.empty(shape, shards[0].dtype)
        for place in parts:
            for rank, shard in enumerate(shards):
                part, there = place.share(shard, rank)
                whole[there] = part
        yield whole
