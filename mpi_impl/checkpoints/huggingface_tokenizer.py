"""The tokenizer in a folder of Hugging Face's layout: its tokenizer.json, or where there is none GPT-2's vocab.json and
merges.txt, or BERT's vocab.txt.

A GPT-2's vocab.json and merges.txt are preferred where tokenizer.json says the same: a run trains with Megatron's
GPT2BPETokenizer then, for which no text is a special token.
"""
import json
import os
from typing import Any

from mpi_impl.data.huggingface_tokenizer import (CONFIG, FOREIGN, RESAVE, SETTINGS, WHOLE, HuggingFaceTokenizer,
                                                 files_in, write_json)
from mpi_impl.data.tokenizer import (END_OF_DOCUMENT, BertWordPieceCase, BertWordPieceLowerCase, GPT2BPETokenizer,
                                     LibraryTokenizer, Tokenizer, WordPieceTokenizer)
from mpi_impl.data.tokenizer_choice import TokenizerChoice, given_tokenizer
from mpi_impl.runtime.files import LARGEST
from mpi_impl.runtime.formats import Object, read_json
from reference.errors import UserError

VOCABULARY, MERGES, WORD_PIECES = "vocab.json", "merges.txt", "vocab.txt"
GIVE = ("Give the one that the model was trained with: --tokenizer-model, --tokenizer-type with its --vocab-file (and "
        "GPT2BPETokenizer's --merge-file), or for ids without text --tokenizer-type NullTokenizer.")
OPTIONS = ("vocab_file", "merge_file", "tokenizer_model")        # that name a tokenizer's files
GPT2S_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_in(folder: str) -> dict[str, Any]:
    """Return the options that choose the folder's own tokenizer; none, if it has none that can be read."""
    pairs, merges, pieces, whole = (os.path.join(folder, name) for name in (VOCABULARY, MERGES, WORD_PIECES, WHOLE))
    files: Any = files_in(folder)
    model_type = str(files.get(CONFIG, {}).get("model_type"))
    if "bert" in model_type:
        settings = files.get(SETTINGS, {})
        lower = settings.get("do_lower_case", True)              # transformers' default
        as_here = settings.get("strip_accents") in (None, lower) and settings.get("tokenize_chinese_chars", True)
        name, path = ("vocab_file", pieces) if os.path.isfile(pieces) else ("tokenizer_model", whole)
        kind = BertWordPieceLowerCase if lower else BertWordPieceCase
        return {"tokenizer_type": kind.name, name: path} if as_here and os.path.isfile(path) else {}
    if model_type == "gpt2" and os.path.isfile(pairs) and os.path.isfile(merges) and (
            not os.path.isfile(whole) or is_gpt2s(read_json(whole, Object, LARGEST), pairs)):
        return {"tokenizer_type": GPT2BPETokenizer.name, "vocab_file": pairs, "merge_file": merges}
    return {"tokenizer_type": HuggingFaceTokenizer.name, "tokenizer_model": whole} if os.path.isfile(whole) else {}


def is_gpt2s(content: Any, pairs: str) -> bool:
    """Report whether a tokenizer.json says what a GPT-2's vocab.json and merges.txt do."""
    return (not content["normalizer"] and GPT2S_SPLIT | (content["pre_tokenizer"] or {}) == GPT2S_SPLIT
            and [token["content"] for token in content["added_tokens"]] == [END_OF_DOCUMENT]
            and END_OF_DOCUMENT in content["model"]["vocab"]
            and content["model"]["vocab"] == read_json(pairs, dict[str, int], LARGEST))


def read_folder(folder: str) -> HuggingFaceTokenizer:
    """Read a GPT's tokenizer as transformers does. Raise UserError if there is none that can be read."""
    if os.path.isfile(path := os.path.join(folder, WHOLE)):
        return HuggingFaceTokenizer.load(path)
    tokenizer = own_tokenizer(folder)
    assert isinstance(tokenizer, LibraryTokenizer)
    files: Any = files_in(folder)
    settings = {"eos_token": tokenizer.end_of_document} | files.get(SETTINGS, {})
    return HuggingFaceTokenizer(json.loads(tokenizer.library.to_str()), files | {SETTINGS: settings})


def own_tokenizer(folder: str) -> Tokenizer:
    """Return the tokenizer of `tokenizer_in`. Raise UserError if there is none."""
    if tokenizer := given_tokenizer(TokenizerChoice(**tokenizer_in(folder))):
        return tokenizer
    refuse_foreign(folder)
    raise UserError(f"--load-hf {folder} holds no tokenizer: {WHOLE} is not there, nor a GPT-2's {VOCABULARY} and "
                    f"{MERGES}, or a BERT's {WORD_PIECES}. {GIVE}")


def refuse_foreign(folder: str) -> None:
    """Raise UserError for a folder with files of a tokenizer that alone do not say how it splits texts."""
    for name in sorted(os.listdir(folder)):
        if name == VOCABULARY or FOREIGN.search(name):
            raise UserError(f"--load-hf {folder} has {name}, but no {WHOLE}, which says how this model's tokenizer "
                            f"splits texts. {RESAVE.format(folder)}")


def check_words(folder: str, tokenizer: Tokenizer, advice: str) -> None:
    """Raise UserError if the tokenizer and the folder's own, if there is one, number a token differently."""
    options = tokenizer_in(folder)
    if not options or not isinstance(tokenizer, LibraryTokenizer):
        return
    own = given_tokenizer(TokenizerChoice(**options))
    assert isinstance(own, LibraryTokenizer)
    words = tokenizer.library.get_vocab()
    for word, i in own.library.get_vocab().items():
        if words.get(word) != i:
            raise UserError(f"{list(options.values())[1]} has another number for the token {word!r} than the "
                            f"{tokenizer.name}. {advice}")


def save_tokenizer(folder: str, tokenizer: Tokenizer, whole: bool = False) -> None:
    """Save the tokenizer for transformers' AutoTokenizer: a model's own with its files, another one `whole`, as a
    tokenizer.json, or as GPT-2's or BERT's files. A tokenizer without files (NullTokenizer) saves nothing.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.save_files(folder)
    elif isinstance(tokenizer, LibraryTokenizer) and whole:
        HuggingFaceTokenizer(json.loads(tokenizer.library.to_str()), {SETTINGS: {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_of_document}}).save_files(folder)
    elif isinstance(tokenizer, LibraryTokenizer):
        tokenizer.library.model.save(folder)
    if isinstance(tokenizer, WordPieceTokenizer):
        write_json(os.path.join(folder, SETTINGS), {"tokenizer_class": "BertTokenizer",
                                                    "do_lower_case": tokenizer.lower_case})
