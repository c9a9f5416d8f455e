"""GPT-2's weights in Hugging Face's layout, in and out: model.safetensors, read by ranks and written from ranks.

Nothing is ever unpickled, and no rank ever holds more of the model than its own part and one tensor. The names say the
same, a matrix is [in, out] there as it is here (they call that a Conv1D), and of every tensor the numbers lie in the
same order: of attention's w_qkv [h, 3, a, d] they see the last three axes as one, with all of q, then k, then v.
`transformers` is not needed for any of this. The tests prove against it that both compute the same.
"""
import json
import os
import re
from collections.abc import Iterator
from math import prod
from tempfile import TemporaryDirectory

import numpy as np
from safetensors import SafetensorError, safe_open

from mpi_impl.arrays import moved_to
from mpi_impl.checkpoints.gpt2_config import CONFIG, config_of, read_json
from mpi_impl.checkpoints.on_disk import write_tensors
from mpi_impl.data.tokenizer import BytePairTokenizer, Tokenizer
from mpi_impl.files import reading, writing
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.errors import UserError
from reference.layout import Piece, Segment
from reference.models.gpt import gpt_tensors
from reference.params import Tensor, leaves, whole

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"       # which of several files has a tensor
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
READ = ("F64", "F32", "F16", "BF16")         # formats, as a file names them
ROWS = 1024                                  # of two tables that are compared, at a time


# ---- names and shapes -----------------------------------------------------------------------------------------------

HEAD = "lm_head.weight"
OF_MODEL = {
    "embedding.word": "wte.weight", "embedding.position": "wpe.weight",
    "final_layernorm.weight": "ln_f.weight", "final_layernorm.bias": "ln_f.bias", "output": HEAD,
}
OF_BLOCK = {
    "input_layernorm.weight": "ln_1.weight", "input_layernorm.bias": "ln_1.bias",
    "attention.w_qkv": "attn.c_attn.weight", "attention.b_qkv": "attn.c_attn.bias",
    "attention.w_out": "attn.c_proj.weight", "attention.b_out": "attn.c_proj.bias",
    "post_attention_layernorm.weight": "ln_2.weight", "post_attention_layernorm.bias": "ln_2.bias",
    "mlp.w_in": "mlp.c_fc.weight", "mlp.b_in": "mlp.c_fc.bias",
    "mlp.w_out": "mlp.c_proj.weight", "mlp.b_out": "mlp.c_proj.bias",
}
PREFIX = "transformer."                                      # of all but lm_head, or of none
MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")      # buffers of older versions: which positions see which


def their_name(name: str) -> str:
    """'blocks.3.mlp.w_in' -> 'h.3.mlp.c_fc.weight', without the prefix."""
    if name in OF_MODEL:
        return OF_MODEL[name]
    _, layer, rest = name.split(".", 2)
    return f"h.{layer}.{OF_BLOCK[rest]}"


def their_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    """[h, 3, a, d] -> [h, 3h], [3, a, d] -> [3h], and any other as it is."""
    if name.endswith("_qkv"):
        return (*tensor.shape[:-3], prod(tensor.shape[-3:]))
    return tensor.shape


# ---- in -------------------------------------------------------------------------------------------------------------


class Weights:
    """The tensors in a folder, by their names without the prefix, in one file or in several with an index."""

    def __init__(self, folder: str):
        """Opens all files. Raises UserError if one is missing, or damaged."""
        self.folder = folder
        self.found = {}                          # name -> the file's path, the open file, the name there
        for path in self.paths():
            file = opened(path)
            for name in file.keys():                             # noqa: SIM118 - it is no dict
                self.found[name.removeprefix(PREFIX)] = path, file, name

    def paths(self) -> list[str]:
        """The files: the one, or those that the index names."""
        one, index = (os.path.join(self.folder, name) for name in (WEIGHTS, INDEX))
        if os.path.isfile(one):
            return [one]
        if os.path.isfile(index):
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise UserError(f"{index} has no weight_map, from the names of tensors to those of files.")
            return [os.path.join(self.folder, name) for name in sorted(set(names.values()))]
        for name in PICKLES:
            if os.path.isfile(os.path.join(self.folder, name)):
                raise UserError(f"{os.path.join(self.folder, name)} is a pickle, which is never opened: it could run "
                                f"any program. Convert it, where you trust it, with transformers: GPT2LMHeadModel."
                                f"from_pretrained({self.folder!r}).save_pretrained(...) writes {WEIGHTS}.")
        raise UserError(f"--load-hf {self.folder} has no {WEIGHTS}, nor a {INDEX}. Give the folder of a model that "
                        "transformers has saved.")

    def slice(self, name: str):
        """A tensor of which nothing has been read yet but its shape and format."""
        _, file, full_name = self.found[name]
        return file.get_slice(full_name)

    def check(self, model: ModelConfig) -> None:
        """Raises UserError unless these are the model's tensors, all of them and no others, of the right shapes."""
        expected = {their_name(name): their_shape(name, tensor) for name, tensor in leaves(gpt_tensors(model))}
        for name, shape in expected.items():
            if name not in self.found:
                raise UserError(f"--load-hf {self.folder} has no tensor {name} in {self.files()}, but its {CONFIG} "
                                f"asks for one, {list(shape)}.")
            found, path = self.slice(name), self.found[name][0]
            if tuple(found.get_shape()) != shape:
                raise UserError(f"{path} has {name} as {found.get_shape()}, but the folder's {CONFIG} asks for "
                                f"{list(shape)}.")
            if found.get_dtype() not in READ:
                raise UserError(f"{path} has {name} in the format {found.get_dtype()}, but it must be one of "
                                f"{', '.join(READ)}.")
        for name in sorted(self.found.keys() - expected.keys()):
            if name == HEAD and self.same(name, "wte.weight"):
                continue                     # tied, but written twice
            if not MASKS.fullmatch(name):
                raise UserError(f"{self.found[name][0]} has a tensor {name}, for which the model of the folder's "
                                f"{CONFIG} has no place.")

    def same(self, one: str, other: str) -> bool:
        """Whether two tables are equal, some rows at a time."""
        a, b = self.slice(one), self.slice(other)
        rows = a.get_shape()[0]
        some = [slice(first, min(first + ROWS, rows)) for first in range(0, rows, ROWS)]     # a file has no rows beyond
        return a.get_shape() == b.get_shape() and all(np.array_equal(a[i], b[i]) for i in some)

    def files(self) -> str:
        return WEIGHTS if os.path.isfile(os.path.join(self.folder, WEIGHTS)) else f"the files of {INDEX}"

    def shard(self, segment: Segment, rank: int, dtype):
        """What tensor-parallel rank `rank` holds of a tensor, [segment.shape]; padding is 0."""
        tensor, file = segment.tensor, self.slice(their_name(segment.name))
        x = np.zeros(segment.shape, dtype)
        if tensor.split is None:
            x[...] = file[:]
            return x
        # The rank's share of the split axis; padding, at the end of the last ones, is not in the file.
        length, share = tensor.shape[tensor.split], segment.shape[tensor.split]
        first = min(rank * share, length)
        last = min(first + share, length)
        if segment.name.endswith("_qkv"):
            a, d = tensor.shape[-2:]
            for i in range(3):               # q, k and v are a d columns each, and a head is d of them
                columns = slice((i * a + first) * d, (i * a + last) * d)
                x[..., i, :, :] = file[..., columns].reshape(x[..., i, :, :].shape)
        elif first < last:
            axes = (slice(None),) * tensor.split
            x[(*axes, slice(last - first))] = file[(*axes, slice(first, last))]
        return x


def opened(path: str):
    """A safetensors file, of which only the header is read. Raises UserError if it cannot be, or is cut off."""
    try:
        with reading(path):
            open(path, "rb").close()         # the library's own errors do not tell
            return safe_open(path, "np")
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file, or is damaged: {error}.") from error


def check_weights(folder: str, model: ModelConfig) -> None:
    """Raises UserError for whatever is wrong with the weights in the folder, before the work."""
    Weights(folder).check(model)


def load_weights(trainer: Trainer, folder: str) -> None:
    """Called by all ranks before the first step: each reads what it owns of the weights. Moments and counters stay 0.

    Raises UserError, on all ranks alike, if one of them cannot read a file.
    """
    trainer.topology.world.from_each(lambda: read_pieces(trainer, Weights(folder)))
    trainer.take_over()


def read_pieces(trainer: Trainer, weights: Weights) -> None:
    master = trainer.optimizer.states["parameters"]
    for piece in trainer.pieces:
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
    trainer.topology.world.from_first(write)


def exhaust(tensors: Iterator) -> None:
    for _ in tensors:
        pass


def write_model(folder: str, trainer: Trainer, tensors: Iterator, tokenizer: Tokenizer) -> None:
    """On rank 0. All files are written aside, and then get their names."""
    with writing(folder), TemporaryDirectory(dir=folder, prefix="unfinished-") as aside:
        write_weights(os.path.join(aside, WEIGHTS), trainer, tensors)
        with open(os.path.join(aside, CONFIG), "w") as file:
            json.dump(config_of(trainer.model, tokenizer.eod, trainer.main.dtype.name), file, indent=2)
        if isinstance(tokenizer, BytePairTokenizer):
            tokenizer.bpe.model.save(aside)              # vocab.json and merges.txt
        for name in os.listdir(aside):
            os.replace(os.path.join(aside, name), os.path.join(folder, name))


def write_weights(path: str, trainer: Trainer, tensors: Iterator) -> None:
    """The tensors, one after another, as they come; with the prefix, and as transformers marks its files."""
    shapes = {their_name(name): their_shape(name, tensor) for name, tensor in leaves(gpt_tensors(trainer.model))}
    shapes = {name if name == HEAD else PREFIX + name: shape for name, shape in shapes.items()}
    write_tensors(path, trainer.main.dtype.name, shapes, tensors, metadata={"format": "pt"})


def gathered(trainer: Trainer) -> Iterator:
    """On rank 0 the elements of each whole tensor, one after another; on the others nothing. All ranks go through it.
    """
    topology, master = trainer.topology, trainer.optimizer.states["parameters"]
    world, t = topology.world, topology.tensor.size
    places = world.from_all([(piece.of.name, topology.place.tensor, within_segment(piece)) for piece in trainer.saved])
    for name, tensor in leaves(gpt_tensors(trainer.model)):
        receives = []
        with trainer.ledger.phase("saving"):
            if world.rank == 0:
                shape = tensor.local_shape(t)
                shards = np.empty((t, prod(shape)), trainer.main.dtype)      # of a replicated tensor only the first
                receives = [world.post_receive(shards[part, place], rank, 0, "weights to save")
                            for rank, theirs in enumerate(places) for other, part, place in theirs if other == name]
            for piece in trainer.saved:
                if piece.of.name == name:
                    world.post_send(master.load(piece), 0, 0, "weights to save").wait()
            for receive in receives:
                receive.wait()
        if world.rank == 0:
            yield whole([shard.reshape(shape) for shard in shards], tensor).reshape(-1)
