"""A BERT that is there already: what it is, its tokenizer, and its weights for a model that is to choose answers."""
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mpi_impl.checkpoints import checkpoint, huggingface, on_disk
from mpi_impl.checkpoints.huggingface_config import check_vocabulary, layout_in, model_options, read_config
from mpi_impl.checkpoints.huggingface_tokenizer import tokenizer_in
from mpi_impl.data import saved_tokenizer
from mpi_impl.data.tokenizer import BertWordPieceLowerCase, Tokenizer, WordPieceTokenizer, given_tokenizer
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.errors import UserError

NEW = "multichoice_head.w"       # what only a tuned model has
GIVE = ("Give the one that the model was trained with: --tokenizer-type BertWordPieceLowerCase, or "
        "BertWordPieceCase, with --vocab-file or --tokenizer-model.")


class Pretrained(NamedTuple):
    """What all ranks must know of it."""

    model: ModelConfig                          # with the head for choices
    tokenizer: WordPieceTokenizer
    tuned: bool                                 # whether it has that head already
    load: Callable[[Trainer], object]           # called by all ranks: the weights, where it has them
    told: str


def architecture_of(args) -> str:
    """On rank 0: that of the model which --load or --load-hf names. Raises UserError if there is none."""
    return (on_disk.read_manifest(args.load).model["architecture"] if args.load else
            layout_in(args.load_hf)[0].architecture)
