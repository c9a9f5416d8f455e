"""Weights in Hugging Face's layout: model.safetensors, read by ranks and written from ranks.

Nothing is ever unpickled, and no rank ever holds more of the model than its own shard and one tensor. The place of each
tensor in the files: gpt2_layout.py, llama_layout.py, mixtral_layout.py and bert_layout.py.

`transformers` is not needed for any of this. The tests prove against it that both compute the same.
"""
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import numpy as np

from mpi_impl.checkpoints.huggingface_config import CONFIG, config_of, layout_in, layout_of, read_config
from mpi_impl.checkpoints.huggingface_layout import TensorPlace, own_experts
from mpi_impl.checkpoints.huggingface_tokenizer import save_tokenizer
from mpi_impl.checkpoints.on_disk import write_tensors
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.runtime.arrays import moved_to
from mpi_impl.runtime.files import LARGEST, folder_aside, path_inside, writing
from mpi_impl.runtime.formats import open_tensors, read_json
from mpi_impl.training.trainer import Trainer
from reference.config import ARCHITECTURES, ModelConfig
from reference.errors import UserError
from reference.models.model import model_tensors
from reference.parallel.layout import Piece, Segment
from reference.params import Tensor, leaves

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"       # maps tensors to files
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
READ = ("F64", "F32", "F16", "BF16")         # formats, as a file names them
ROWS = 1024                                  # of two tables, compared at a time
OLD_NAMES = {"gamma": "weight", "beta": "bias"}      # of a LayerNorm, in the first published BERTs
# Tensors that a model which is to be tuned may begin without.
NEW = ("pooler.", "multichoice_head.", "entailment_head.", "paraphrase_head.", "span_head.")


def places_of(model: ModelConfig) -> Iterator[tuple[str, Tensor, list[TensorPlace]]]:
    """Yield each tensor of ours, by name, with its places in the files."""
    layout = layout_of(model)
    for name, tensor in leaves(model_tensors(model)):
        yield name, tensor, layout.places(name, tensor, model.num_layers)


# ---- read -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightIndex:
    """The index of several files."""

    weight_map: dict[str, str]       # tensor name -> file name


class Weights:
    """The tensors in a folder, by their names without the prefix, in one file or in several with an index."""

    def __init__(self, folder: str):
        """Open all files. Raise UserError if one is missing, or damaged."""
        self.folder, (self.layout, _) = folder, layout_in(folder)
        config = read_config(folder, self.layout.architecture)
        self.num_layers, experts = (config[self.layout.same[name]] if name in self.layout.same else 0
                                    for name in ("num_layers", "num_experts"))
        self.found = {}                          # name -> the file's path, the open file, the name there
        for path in self.paths():
            file = open_tensors(path)
            for name in file.keys():                             # noqa: SIM118 - it is no dict
                self.found[self.short_name(name)] = path, file, name
        for number, what in ((self.num_layers, "layers"), (experts, "experts")):
            if number > len(self.found):         # before that many are declared
                raise UserError(f"{os.path.join(folder, CONFIG)} asks for {number:,} {what}, but {self.files()} has "
                                f"{len(self.found):,} tensors in all. Give the files of one model.")

    def short_name(self, name: str) -> str:
        """Return a name without the prefix, in today's spelling."""
        name = name.removeprefix(self.layout.prefix)
        return re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda old: OLD_NAMES[old[0]], name)

    def paths(self) -> list[str]:
        """Return the files: a single one, or those that the index names."""
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
        """Return a lazy view of a tensor, of which only shape and format have been read."""
        _, file, full_name = self.found[name]
        return file.get_slice(full_name)

    def check(self, model: ModelConfig) -> None:
        """Raise UserError unless these are the model's tensors, of the right shapes, and no others than `extra`."""
        expected, new = set(), () if "lm" in model.heads else NEW
        for ours, _, places in places_of(model):
            for place in places:
                if place.name in self.found or not ours.startswith(new):
                    self.check_tensor(place)
                expected.add(place.name)
        for name in sorted(self.found.keys() - expected - self.extra(model)):
            raise UserError(f"{self.found[name][0]} has a tensor {name}, for which the model of the folder's {CONFIG} "
                            "has no place.")

    def check_tensor(self, place: TensorPlace) -> None:
        """Raise UserError unless the tensor is there, in the right shape and in a format that can be read."""
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
        """Return tensors that may be skipped: those of heads that the model lacks, buffers, and copies of tied ones."""
        twins = self.layout.twins
        heads = {place.name for heads in ARCHITECTURES[model.architecture]
                 for _, _, places in places_of(replace(model, heads=heads)) for place in places}
        buffers = {name for name in self.found if self.layout.buffers.fullmatch(name)}
        copies = {name for name in twins.keys() & self.found.keys() if not model.tied or self.same(name, twins[name])}
        return heads | buffers | copies

    def same(self, one: str, other: str) -> bool:
        """Report whether two tables, or biases, are equal, some rows at a time."""
        a, b = self.slice(one), self.slice(other)
        rows = a.get_shape()[0]
        blocks = [slice(first, min(first + ROWS, rows)) for first in range(0, rows, ROWS)]
        return a.get_shape() == b.get_shape() and all(np.array_equal(a[i], b[i]) for i in blocks)

    def files(self) -> str:
        return WEIGHTS if os.path.isfile(os.path.join(self.folder, WEIGHTS)) else f"the files of {INDEX}"

    def has(self, segment: Segment) -> bool:
        """Report whether a tensor is here: all of the model is, except perhaps a new head."""
        return all(place.name in self.found for place in self.places(segment))

    def places(self, segment: Segment) -> list[TensorPlace]:
        return self.layout.places(segment.name, segment.tensor, self.num_layers)

    def shard(self, segment: Segment, rank: int, dtype, expert_rank: int = 0):
        """Return tensor-parallel rank `rank`'s shard of a tensor, [segment.shape], of its experts; padding is 0."""
        x, places = np.zeros(segment.shape, dtype), self.places(segment)
        for place in own_experts(places, expert_rank, len(x)) if segment.tensor.dealt else places:
            part, there = place.shard_and_place(x, rank // segment.copies)
            if part.size:
                part[...] = self.slice(place.name)[there]
        return x


def check_weights(folder: str, model: ModelConfig) -> None:
    """Raise UserError for anything wrong with the weights in the folder, before the work."""
    Weights(folder).check(model)


def load_weights(trainer: Trainer, folder: str) -> None:
    """Load each rank's own shards, called by all ranks before the first step. Moments and counters stay 0.

    A head for choices that is not in the files keeps its initial values. Raises UserError, on every rank, if one of
    them cannot read a file.
    """
    trainer.topology.world.collect_objects(lambda: read_pieces(trainer, Weights(folder)))
    trainer.state.adopt_master_weights()


def read_pieces(trainer: Trainer, weights: Weights) -> None:
    master, topology = trainer.state.optimizer_states["parameters"], trainer.topology
    for piece in trainer.state.pieces:
        if weights.has(piece.of):
            x = weights.shard(piece.of, topology.tensor.rank, trainer.state.main.dtype, topology.expert_rank)
            master.store(piece, moved_to(x.reshape(-1)[within_segment(piece)], trainer.state.main))


def within_segment(piece: Piece) -> slice:
    """Return the place of a piece in its tensor's shard, flat."""
    return slice(piece.in_buffer.start - piece.of.offset, piece.in_buffer.stop - piece.of.offset)


# ---- write ----------------------------------------------------------------------------------------------------------


def save_model(trainer: Trainer, folder: str, tokenizer: Tokenizer | None) -> None:
    """Write the model to an existing folder. Called by all ranks; rank 0 gives the tokenizer, the others None.

    Raises UserError, on every rank, if a file cannot be written. The folder's content is then unchanged.
    """
    tensors = gather_tensors(trainer)

    def write() -> None:
        assert tokenizer is not None
        try:
            write_model(folder, trainer, tensors, tokenizer)
        finally:
            exhaust(tensors)             # after a failed write the others still send them

    if tokenizer is None:
        exhaust(tensors)
    trainer.topology.world.broadcast_object(write)


def exhaust(tensors: Iterator) -> None:
    for _ in tensors:
        pass


def write_model(folder: str, trainer: Trainer, tensors: Iterator, tokenizer: Tokenizer) -> None:
    """Write all files aside, on rank 0, and rename them to their places."""
    with writing(folder), folder_aside(folder) as aside:
        write_weights(os.path.join(aside, WEIGHTS), trainer, tensors)
        with open(os.path.join(aside, CONFIG), "w") as file:
            json.dump(config_of(trainer.state.model, tokenizer, trainer.state.main.dtype.name), file, indent=2)
        save_tokenizer(aside, tokenizer, whole=bool(layout_of(trainer.state.model).derived))
        for name in os.listdir(aside):
            os.replace(os.path.join(aside, name), os.path.join(folder, name))


def write_weights(path: str, trainer: Trainer, tensors: Iterator) -> None:
    """Write the tensors, one after another, as they come; with the prefix, and marked as transformers marks files."""
    full_name = layout_of(trainer.state.model).full_name
    shapes = {full_name(place.name): place.shape for _, _, places in places_of(trainer.state.model) for place in places}
    write_tensors(path, trainer.state.main.dtype.name, shapes, tensors, metadata={"format": "pt"})


def gather_tensors(trainer: Trainer) -> Iterator:
    """Yield the elements of each whole tensor, in transformers' layout, on rank 0; nothing on the others.

    All ranks go through it.
    """
    topology, master = trainer.topology, trainer.state.optimizer_states["parameters"]
    world, t, e = topology.world, topology.tensor.size, topology.config.expert_model_parallel_size
    where = world.allgather_objects([(piece.of.name, (topology.place.tensor, topology.expert_rank if
                                                      piece.of.tensor.dealt else 0), within_segment(piece))
                                     for piece in trainer.state.saved])
    for name, tensor, places in places_of(trainer.state.model):
        receives = []
        with trainer.ledger.phase("saving"):
            if world.rank == 0:
                shape = tensor.local_shape(t)                # with all experts
                parts = e if tensor.dealt else 1
                shards = np.empty((t, parts, prod(shape) // parts), trainer.state.main.dtype)    # of copies the first
                receives = [world.post_receive(shards[(*part, place)], rank, 0, "weights to save")
                            for rank, theirs in enumerate(where) for other, part, place in theirs if other == name]
            for piece in trainer.state.saved:
                if piece.of.name == name:
                    world.post_send(master.load(piece), 0, 0, "weights to save").wait()
            for receive in receives:
                receive.wait()
        if world.rank == 0:
            sources = shards[::tensor.copies(t)]
            yield from join_shards([shard.reshape(shape) for shard in sources], places)


def join_shards(shards: list, places: list[TensorPlace]) -> Iterator:
    """Yield each of their tensors that a tensor of ours makes, from its shards."""
    for (_, shape), parts in groupby(places, lambda place: (place.name, place.shape)):
        whole = np.empty(shape, shards[0].dtype)
        for place in parts:
            for number, shard in enumerate(shards):
                part, there = place.shard_and_place(shard, number)
                whole[there] = part
        yield whole
