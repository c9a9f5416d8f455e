"""The tokenizer in a folder of Hugging Face's layout: GPT-2's vocab.json and merges.txt, BERT's vocab.txt, or the
tokenizer.json of a Llama.
"""
import json
import os
from typing import Any

from mpi_impl.data.huggingface_tokenizer import HuggingFaceTokenizer
from mpi_impl.data.tokenizer import (BertWordPieceCase, BertWordPieceLowerCase, BytePairTokenizer, GPT2BPETokenizer,
                                     LibraryTokenizer, Tokenizer, WordPieceTokenizer)
from mpi_impl.runtime.files import LARGEST, read_bytes
from mpi_impl.runtime.formats import Object, read_json
from reference.errors import UserError

VOCABULARY, MERGES = "vocab.json", "merges.txt"
WORD_PIECES, SETTINGS, WHOLE = "vocab.txt", "tokenizer_config.json", "tokenizer.json"
OPTIONS = ("vocab_file", "merge_file", "tokenizer_model")        # that name a tokenizer's files


def tokenizer_in(folder: str) -> dict[str, Any]:
    """Return the options that choose the folder's own tokenizer; none, if it has none that is built here."""
    pairs, merges, pieces, settings = (os.path.join(folder, name)
                                       for name in (VOCABULARY, MERGES, WORD_PIECES, SETTINGS))
    if os.path.isfile(pairs) and os.path.isfile(merges):
        return {"tokenizer_type": GPT2BPETokenizer.name, "vocab_file": pairs, "merge_file": merges}
    found = read_json(settings, Object) if os.path.isfile(settings) else {}
    lower = found.get("do_lower_case", True)                     # transformers' default
    as_here = found.get("strip_accents") in (None, lower) and found.get("tokenize_chinese_chars", True)
    if os.path.isfile(whole := os.path.join(folder, WHOLE)) and os.path.isfile(settings) and not os.path.isfile(pieces):
        return {"tokenizer_type": HuggingFaceTokenizer.name, "tokenizer_model": whole}
    if not os.path.isfile(pieces) or not as_here:
        return {}
    kind = BertWordPieceLowerCase if lower else BertWordPieceCase
    return {"tokenizer_type": kind.name, "vocab_file": pieces}


def check_words(folder: str, tokenizer: Tokenizer, advice: str) -> None:
    """Raise UserError if the tokenizer and the folder's vocabulary, if there is one, number a token differently."""
    name = (VOCABULARY if isinstance(tokenizer, BytePairTokenizer) else
            WORD_PIECES if isinstance(tokenizer, WordPieceTokenizer) else None)
    if name is None or not os.path.isfile(path := os.path.join(folder, name)):
        return
    assert isinstance(tokenizer, LibraryTokenizer)
    words = tokenizer.library.get_vocab()
    for word, i in (read_json(path, dict[str, int], LARGEST) if name == VOCABULARY else read_word_pieces(path)).items():
        if words.get(word) != i:
            raise UserError(f"{path} has another number for the token {word!r} than the {tokenizer.name}. {advice}")


def read_word_pieces(path: str) -> dict[str, int]:
    """Read a vocabulary with a token in each line; the line is its number."""
    text = read_bytes(path).decode("utf-8", errors="replace")
    return {line.rstrip(): i for i, line in enumerate(text.removesuffix("\n").split("\n"))}


def save_tokenizer(folder: str, tokenizer: Tokenizer, whole: bool = False) -> None:
    """Save the tokenizer for transformers' AutoTokenizer: `whole`, as a tokenizer.json, or as GPT-2's or BERT's files.
    A tokenizer without files (NullTokenizer) saves nothing.
    """
    if isinstance(tokenizer, LibraryTokenizer) and (whole or isinstance(tokenizer, HuggingFaceTokenizer)):
        with open(os.path.join(folder, WHOLE), "w", encoding="utf-8") as file:
            file.write(tokenizer.library.to_str())
        write_settings(folder, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_of_document})
    elif isinstance(tokenizer, LibraryTokenizer):
        tokenizer.library.model.save(folder)
    if isinstance(tokenizer, WordPieceTokenizer):
        write_settings(folder, {"tokenizer_class": "BertTokenizer", "do_lower_case": tokenizer.lower_case})


def write_settings(folder: str, settings: dict[str, Any]) -> None:
    with open(os.path.join(folder, SETTINGS), "w") as file:
        json.dump(settings, file, indent=2)
