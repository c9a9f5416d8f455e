"""Sources of weights, with the model's sizes and its tokenizer: the user need not repeat them."""
from typing import NamedTuple, Protocol, Self

import numpy as np

from mpi_impl.checkpoints import checkpoint, on_disk
from mpi_impl.checkpoints.huggingface import Weights, check_weights, within_segment
from mpi_impl.checkpoints.huggingface_config import check_vocabulary, model_of, notes, read_config
from mpi_impl.checkpoints.huggingface_tokenizer import GIVE, read_folder
from mpi_impl.checkpoints.manifest import Manifest
from mpi_impl.comm.group import Group
from mpi_impl.comm.topology import Topology
from mpi_impl.data import saved_tokenizer
from mpi_impl.data.saved_tokenizer import SAVED
from mpi_impl.data.tokenizer import ByteLevelBPETokenizer, GPT2BPETokenizer, NullTokenizer, Tokenizer
from mpi_impl.data.tokenizer_choice import TokenizerChoice, given_tokenizer
from mpi_impl.inference.replica import Read, Replica, load_replica
from mpi_impl.runtime.arrays import dtype_of
from mpi_impl.runtime.tables import bytes_of
from reference.config import ModelConfig
from reference.errors import UserError
from reference.parallel.boxes import boxes_of_piece
from reference.parallel.layout import Piece
from reference.precision import Precision


class ModelSource(Protocol):
    """A model on disk."""

    @property
    def model(self) -> ModelConfig: ...

    def tokenizer(self, args) -> Tokenizer:
        """Return the tokenizer that the options name, or the model's own. Raise UserError if it is another model's.

        Called by rank 0.
        """

    def reader(self, ranks: Group, tensor_rank: int, dtype: str) -> Read:
        """Return a reader of one tensor-parallel rank's shards. Called by all; raises UserError for damaged files."""

    def describe(self) -> str: ...


def find(args) -> ModelSource:
    """Return the source that --load or --load-hf names, on rank 0. Raise UserError if it is missing, or not a GPT."""
    if args.load:
        source = Checkpoint.read(args.load)
        if source.model.architecture != "gpt":
            raise UserError(f"--load {args.load} holds a BERT, which predicts missing tokens but does not continue a "
                            "text. Give a checkpoint of pretrain_gpt.")
        return source
    config = read_config(args.load_hf, "gpt")
    model = model_of(config)
    check_weights(args.load_hf, model)
    return HuggingFace(args.load_hf, model)


def load_model(source: ModelSource, topology: Topology, dtype: str, like) -> Replica:
    """Load a model that computes in `dtype`, on the device of `like`.

    Called by all ranks. Raises UserError, on every rank, for damaged files and for too few layers.
    """
    precision = Precision(dtype)
    read = source.reader(topology.world, topology.place.tensor, precision.main)
    return load_replica(source.model, topology, np.empty_like(like, dtype=dtype_of(precision.compute)), read)


def named_tokenizer(args, model: ModelConfig, usual: str) -> Tokenizer | None:
    """Return the tokenizer that the options name, by default of the `usual` type; None if they name none.

    Raises UserError if they are incomplete.
    """
    if not any((args.tokenizer_type, args.vocab_file, args.merge_file, args.tokenizer_model)):
        return None
    kind = args.tokenizer_type or usual
    size = model.vocab_size - 1 if kind == NullTokenizer.name else None
    found = given_tokenizer(TokenizerChoice(tokenizer_type=kind, vocab_size=size, vocab_file=args.vocab_file,
                                            merge_file=args.merge_file, tokenizer_model=args.tokenizer_model))
    if found is None:
        raise UserError(f"--tokenizer-type is {kind}, which is trained on a corpus, but no file with it is named. "
                        f"{GIVE}")
    return found


class Checkpoint(NamedTuple):
    """A checkpoint of ours: the last in its folder."""

    root: str
    manifest: Manifest

    @classmethod
    def read(cls, root: str) -> Self:
        return cls(root, on_disk.read_manifest(root))

    @property
    def model(self) -> ModelConfig:
        return self.manifest.config

    def tokenizer(self, args) -> Tokenizer:
        trained_with = self.manifest.settings.get("tokenizer_type", ByteLevelBPETokenizer.name)
        found = named_tokenizer(args, self.model, trained_with) or self.own_tokenizer()
        advice = f"{GIVE} Without these options it is the one that was saved with the model."
        checkpoint.check_tokenizer(self.root, self.manifest, found, advice)
        return found

    def own_tokenizer(self) -> Tokenizer:
        if saved_tokenizer.is_saved(self.root):
            return saved_tokenizer.load(self.root)
        if self.manifest.settings.get("tokenizer_type") == NullTokenizer.name:
            return NullTokenizer(self.model.vocab_size - 1)
        raise UserError(f"--load {self.root} holds no tokenizer: {SAVED} is not there. {GIVE}")

    def reader(self, ranks: Group, tensor_rank: int, dtype: str) -> Read:
        checkpoint.check_files(ranks, self.root, self.manifest, "parameters")
        stored = on_disk.StateReader(self.root, "parameters", self.manifest)

        def read(piece: Piece) -> np.ndarray:
            box, = boxes_of_piece(piece, tensor_rank)       # whole rows
            return stored.read(piece.of.name, box).reshape(-1).astype(dtype)

        return read

    def describe(self) -> str:
        folder = on_disk.folder_of(self.root, self.manifest.iteration)
        size = bytes_of(sum(file.bytes for file in self.manifest.files_of("parameters").values()))
        return f"loaded iteration {self.manifest.iteration}: {size} of parameters, {folder}"


class HuggingFace(NamedTuple):
    """A GPT-2 or a Llama as transformers saves it."""

    folder: str
    model: ModelConfig

    def tokenizer(self, args) -> Tokenizer:
        found = named_tokenizer(args, self.model, GPT2BPETokenizer.name) or read_folder(self.folder)
        check_vocabulary(self.folder, found)
        return found

    def reader(self, ranks: Group, tensor_rank: int, dtype: str) -> Read:
        weights = Weights(self.folder)

        def read(piece: Piece) -> np.ndarray:
            return weights.shard(piece.of, tensor_rank, dtype).reshape(-1)[within_segment(piece)]

        return read

    def describe(self) -> str:
        return f"loaded the weights in {self.folder}{notes(self.folder)}"
