"""A pretrained BERT: its configuration, its tokenizer, and its weights for a model with the head of a task."""
from dataclasses import replace
from typing import NamedTuple

from mpi_impl.checkpoints import checkpoint, huggingface
from mpi_impl.checkpoints.bert_layout import OF_MODEL
from mpi_impl.checkpoints.huggingface_config import check_vocabulary, layout_in, model_of, notes, read_config
from mpi_impl.checkpoints.huggingface_tokenizer import own_tokenizer
from mpi_impl.checkpoints.manifest import Manifest
from mpi_impl.data.tokenizer import BertWordPieceLowerCase, Tokenizer, WordPieceTokenizer
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.errors import UserError
from reference.models.bert import CLASSIFIERS
from shardlab.evaluate.tasks import TASKS
from shardlab.generate.sources import Checkpoint, named_tokenizer


class Pretrained(NamedTuple):
    """The facts about the model that all ranks must know."""

    model: ModelConfig                # with the task's head
    tokenizer: WordPieceTokenizer
    tuned: bool                       # whether its weights have that head, too
    folder: str
    manifest: Manifest | None         # of one of our checkpoints

    def load(self, trainer: Trainer) -> None:
        """Load the weights, on all ranks, before the first step. Tensors that the folder lacks keep initial values."""
        if self.manifest:
            checkpoint.load_weights(trainer, self.folder, self.manifest)
        else:
            huggingface.load_weights(trainer, self.folder)

    def describe(self) -> str:
        head = "tuned before" if self.tuned else "with a new head"
        iteration = f" of iteration {self.manifest.iteration}" if self.manifest else ""
        slips = "" if self.manifest else notes(self.folder)
        return f"it begins with the weights{iteration} in {self.folder}, {head}{slips}"


def architecture_of(args) -> str:
    """Return the architecture of the model in --load or --load-hf, on rank 0. Raise UserError if there is none."""
    if args.load:
        return Checkpoint.read(args.load).model.architecture
    return layout_in(args.load_hf)[0].architecture


def find_pretrained(args) -> Pretrained:
    """Return the BERT that --load or --load-hf names, on rank 0. Raise UserError for anything wrong with it."""
    return from_checkpoint(args) if args.load else from_hugging_face(args)


def from_checkpoint(args) -> Pretrained:
    source = Checkpoint.read(args.load)
    tokenizer = with_word_pieces(source.tokenizer(args))
    return Pretrained(with_head(source.model, args), tokenizer, tensor_of_head(args) in source.manifest.tensors,
                      args.load, source.manifest)


def from_hugging_face(args) -> Pretrained:
    folder, config = args.load_hf, read_config(args.load_hf, "bert")
    model = with_head(model_of(config, architecture="bert", heads=("lm",)), args)
    huggingface.check_weights(folder, model)
    tokenizer = named_tokenizer(args, model, BertWordPieceLowerCase.name) or own_tokenizer(folder)
    check_vocabulary(folder, tokenizer)
    tuned = OF_MODEL[tensor_of_head(args)] in huggingface.Weights(folder).found
    return Pretrained(model, with_word_pieces(tokenizer), tuned, folder, None)


def tensor_of_head(args) -> str:
    """Return the name of a tensor that only a model has that was tuned on the task."""
    return f"{CLASSIFIERS.get(TASKS[args.task].head, 'span_head')}.w"


def with_head(model: ModelConfig, args) -> ModelConfig:
    """Return the same model with the task's head, and with the options' dropout."""
    return replace(model, heads=(TASKS[args.task].head,), hidden_dropout=args.hidden_dropout,
                   attention_dropout=args.attention_dropout)


def with_word_pieces(tokenizer: Tokenizer) -> WordPieceTokenizer:
    """Return the tokenizer. Raise UserError for one that cannot separate a question from a passage."""
    if not isinstance(tokenizer, WordPieceTokenizer):
        raise UserError(f"--task race, mnli, qqp and squad need a tokenizer with [CLS] and [SEP], but the model's is "
                        f"a {tokenizer.name}. Give a BERT that was trained with BertWordPieceLowerCase or "
                        "BertWordPieceCase.")
    return tokenizer
