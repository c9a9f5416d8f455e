"""A tokenizer in the folder of its model, so that the user need not name it again.

    tokenizer.json     the file that `--tokenizer-model` reads; or for a NullTokenizer, {"NullTokenizer": vocab_size}
"""
import json
import os

from mpi_impl.data.huggingface_tokenizer import HuggingFaceTokenizer
from mpi_impl.data.tokenizer import (BertWordPieceCase, BertWordPieceLowerCase, ByteLevelBPETokenizer, LibraryTokenizer,
                                     NullTokenizer, Tokenizer, TrainedTokenizer)
from mpi_impl.runtime.files import LARGEST, replacing, write_whole
from mpi_impl.runtime.formats import Object, read_json
from reference.errors import UserError

SAVED = "tokenizer.json"


def save(tokenizer: Tokenizer, folder: str) -> None:
    """Write the tokenizer to an existing folder, completely or not at all. Raise UserError if that is impossible."""
    path = os.path.join(folder, SAVED)
    if isinstance(tokenizer, LibraryTokenizer):
        with replacing(path) as aside:
            tokenizer.save(aside)
    else:
        write_whole(path, json.dumps({NullTokenizer.name: tokenizer.vocab_size}))


def is_saved(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, SAVED))


def load(folder: str) -> Tokenizer:
    """Read the tokenizer in a folder. Raise UserError if there is none, or something else.

    (GPT-2's comes back as a ByteLevelBPETokenizer, which it is: it gives the same ids, and has the same fingerprint.)
    """
    path = os.path.join(folder, SAVED)
    try:
        content = read_json(path, Object, LARGEST)
        if NullTokenizer.name in content:
            if type(size := content[NullTokenizer.name]) is not int:
                raise ValueError("its size is not an integer")
            return NullTokenizer(size - 1)
        if HuggingFaceTokenizer.name in content:
            return HuggingFaceTokenizer.load(path)
        kind = type_of(content)
    except (ValueError, TypeError, KeyError) as error:      # bad JSON, bad UTF-8, or another kind of file
        raise UserError(f"{path} is not a tokenizer that was saved here ({error}).") from error
    return kind.load(path)


def type_of(content: dict) -> type[TrainedTokenizer]:
    """Return the tokenizer's class, by its algorithm and its normalization of text."""
    if content["model"]["type"] == "BPE":
        return ByteLevelBPETokenizer
    return BertWordPieceLowerCase if content["normalizer"]["lowercase"] else BertWordPieceCase
