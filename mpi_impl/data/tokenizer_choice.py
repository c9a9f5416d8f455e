"""The options that choose a tokenizer, and the tokenizer that they determine."""
import os
from collections.abc import Callable

from mpi_impl.data.huggingface_tokenizer import FOREIGN, RESAVE, WHOLE, HuggingFaceTokenizer
from mpi_impl.data.tokenizer import (DEFAULT_VOCAB_SIZE, BertWordPieceCase, BertWordPieceLowerCase,
                                     ByteLevelBPETokenizer, GPT2BPETokenizer, NullTokenizer, Tokenizer,
                                     TrainedTokenizer, WordPieceTokenizer)
from mpi_impl.data.tokenizer_types import READS, TOKENIZER_TYPES
from mpi_impl.launch.option_fields import option_field, option_group
from reference.config import option
from reference.errors import UserError

FILES = ("vocab_file", "merge_file", "tokenizer_model")         # the options that name a tokenizer's files
TRAINED: dict[str, type[TrainedTokenizer]] = {
    kind.name: kind for kind in (ByteLevelBPETokenizer, BertWordPieceLowerCase, BertWordPieceCase)}


@option_group
class TokenizerChoice:
    """The tokenizer."""

    tokenizer_type: str = option_field(ByteLevelBPETokenizer.name, choices=TOKENIZER_TYPES)
    tokenizer_model: str | None = option_field(
        None, "a tokenizer of that type that was trained before, such as the OUT.tokenizer.json of "
        "mpi_impl.data.prepare, or for a HuggingFaceTokenizer a model's tokenizer.json", "F")
    vocab_size: int | None = option_field(
        None, f"of the tokenizer that is trained on the corpus (default: {DEFAULT_VOCAB_SIZE}), or of a NullTokenizer",
        "V")
    vocab_file: str | None = option_field(None, "GPT-2's vocab.json, or BERT's vocab.txt", "F")
    merge_file: str | None = option_field(None, "GPT-2's merges.txt", "F")

    @property
    def size_to_train(self) -> int:
        """Return the requested vocabulary size of a tokenizer that is trained."""
        return DEFAULT_VOCAB_SIZE if self.vocab_size is None else self.vocab_size

    def paths(self) -> dict[str, str]:
        """Return the files that are given, by option."""
        return {name: path for name in FILES if (path := getattr(self, name))}


def given_tokenizer(choice: TokenizerChoice) -> Tokenizer | None:
    """Return the tokenizer that the options alone determine, or None for one of TRAINED that the corpus determines.

    Raises UserError for an unknown type, a missing option, and an option that this type would ignore.
    """
    if choice.tokenizer_type not in TOKENIZER_TYPES:
        raise UserError(f"--tokenizer-type {choice.tokenizer_type} is unknown. Give one of "
                        f"{', '.join(TOKENIZER_TYPES)}.")
    check_paths(choice.tokenizer_type, paths := choice.paths())
    if choice.tokenizer_type == NullTokenizer.name:
        if choice.vocab_size is None:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size: the number of token ids in the data.")
        return NullTokenizer(choice.vocab_size)
    if choice.tokenizer_type == HuggingFaceTokenizer.name and not paths:
        raise UserError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: a model's tokenizer.json, with "
                        "its tokenizer_config.json next to it.")
    if not paths:
        TRAINED[choice.tokenizer_type].check_size(choice.size_to_train)
        return None
    tokenizer = read_tokenizer(choice.tokenizer_type, paths)
    if choice.vocab_size not in (None, tokenizer.vocab_size):
        name, path = next(iter(paths.items()))
        raise UserError(f"--vocab-size {choice.vocab_size} contradicts {option(name)} {path}, which holds "
                        f"{tokenizer.vocab_size:,} tokens. Leave --vocab-size out.")
    return tokenizer


def check_paths(tokenizer_type: str, paths: dict[str, str]) -> None:
    """Raise UserError if this type reads other files, or fewer, or more."""
    for name in paths:
        if name not in READS[tokenizer_type]:
            readers = " or ".join(kind for kind, names in READS.items() if name in names)
            raise UserError(f"{option(name)} is for --tokenizer-type {readers}; {tokenizer_type} does not read such a "
                            "file. Leave it out, or choose another type.")
    if tokenizer_type == GPT2BPETokenizer.name and len(paths) < 2:
        raise UserError("--tokenizer-type GPT2BPETokenizer needs both --vocab-file (GPT-2's vocab.json) and "
                        "--merge-file (its merges.txt).")
    if "vocab_file" in paths and "tokenizer_model" in paths:
        raise UserError("--vocab-file and --tokenizer-model both name a tokenizer. Leave one of the two out.")


def read_tokenizer(tokenizer_type: str, paths: dict[str, str]) -> Tokenizer:
    for name, path in paths.items():
        if FOREIGN.search(path):
            raise UserError(f"{option(name)} {path} is a file of SentencePiece or tiktoken, but --tokenizer-type "
                            f"HuggingFaceTokenizer reads a {WHOLE}. {RESAVE.format(os.path.dirname(path) or '.')}")
    if tokenizer_type == GPT2BPETokenizer.name:
        return GPT2BPETokenizer(**paths)
    if tokenizer_type == HuggingFaceTokenizer.name:
        return HuggingFaceTokenizer.load(paths["tokenizer_model"])
    kind = TRAINED[tokenizer_type]
    if issubclass(kind, WordPieceTokenizer) and "vocab_file" in paths:
        return kind.from_vocab_file(paths["vocab_file"])
    return kind.load(paths["tokenizer_model"])


def report_shortage(tokenizer: Tokenizer, requested: int, report: Callable[[str], None]) -> None:
    """Report a vocabulary that is smaller than requested."""
    if tokenizer.vocab_size < requested:
        report(f"the vocabulary has {tokenizer.vocab_size:,} tokens, not the {requested:,} asked for: the corpus is "
               "too small to support more")
