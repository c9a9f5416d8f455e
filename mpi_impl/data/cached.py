"""The way from `--data-path` to tokens on disk: a trained tokenizer and an encoded corpus, cached for the next run."""
import hashlib
import json
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import tokenizers

from mpi_impl.data.corpus import Corpus
from mpi_impl.data.encode import encode_documents, encode_sentences, report_progress
from mpi_impl.data.indexed import IndexedDataset, write_indexed
from mpi_impl.data.saved_tokenizer import SAVED
from mpi_impl.data.tokenizer import Tokenizer, TrainedTokenizer
from mpi_impl.data.tokenizer_choice import TRAINED, TokenizerChoice, given_tokenizer, report_shortage
from mpi_impl.runtime.files import checksum, folder_aside, read_text
from mpi_impl.runtime.tables import count
from reference.errors import UserError

CHECKSUMS = "xxh128sum.txt"
RECIPE = 2  # increase it when the same corpus and options begin to give other tokens: older caches are then ignored

Report = Callable[[str], None]


class Prepared(NamedTuple):
    """The path of the tokens (PREFIX.bin and PREFIX.idx), and the tokenizer that made them."""

    prefix: str
    tokenizer: Tokenizer


def prepare(data_path: str | None, choice: TokenizerChoice, split_sentences: bool = False,
            cache: str | Path | None = None, report: Report = print) -> Prepared:
    """Prepare the tokens of a corpus, or find them in the cache: `data_path` is a Corpus or a Megatron prefix.

    With `split_sentences` each document has a sequence for each sentence, and no end-of-document token. The result is
    kept in `cache` (~/.cache/shardlab when None; XDG_CACHE_HOME is honoured) under a hash of all that determines it.
    `report` is called with a sentence from time to time. Called on one rank. Raises UserError for options that do not
    go together, for data that Corpus or IndexedDataset refuses, and for a cache that cannot be written.
    """
    tokenizer = given_tokenizer(choice)
    if data_path and (prefix := megatron_prefix(data_path)):
        if tokenizer is None:
            raise UserError(f"--data-path {data_path} is already tokenized, so {choice.tokenizer_type} cannot be "
                            "trained on it. Give the tokenizer it was made with: --tokenizer-model with what was saved "
                            "next to it, --tokenizer-type GPT2BPETokenizer with --vocab-file and --merge-file, or "
                            "--tokenizer-type NullTokenizer with --vocab-size.")
        return open_tokens(prefix, tokenizer, report)
    root = cache_folder(cache)
    if data_path and os.path.realpath(root) == os.path.realpath(data_path):
        raise UserError(f"--data-path {data_path} is the cache folder, whose files are not texts to learn from. Give "
                        "another --data-path or another --data-cache-path.")
    corpus = Corpus(data_path, leave_out=root)
    wanted = tokenizer or TRAINED[choice.tokenizer_type]
    size = tokenizer.vocab_size if tokenizer else choice.size_to_train
    folder = root / key(corpus.files, tokenizer, choice.tokenizer_type, size, split_sentences)
    try:
        if not is_complete(folder, report):
            build(folder, corpus, wanted, size, split_sentences, report)
    except OSError as error:
        raise UserError(f"The cache folder {root} cannot be written ({error}). Make room there, or give "
                        "--data-cache-path a folder that you can write.") from error
    tokenizer = wanted.load(folder / SAVED) if isinstance(wanted, type) else wanted
    report_shortage(tokenizer, size, report)
    return open_tokens(str(folder / "tokens"), tokenizer, report)


def megatron_prefix(data_path: str) -> str | None:
    """Return PREFIX if the path is PREFIX, PREFIX.bin or PREFIX.idx. IndexedDataset reports a missing one."""
    for suffix in ".bin", ".idx":
        if data_path.endswith(suffix) and os.path.isfile(data_path):
            return data_path.removesuffix(suffix)
    found = [os.path.isfile(data_path + suffix) for suffix in (".bin", ".idx")]
    is_prefix = all(found) or (any(found) and not os.path.exists(data_path))
    return data_path if is_prefix else None


def open_tokens(prefix: str, tokenizer: Tokenizer, report: Report) -> Prepared:
    """Open the data set, so that a damaged file is refused here, and report its size."""
    dataset = IndexedDataset(prefix)
    report(f"{count(len(dataset.tokens), 'token')} in "
           f"{count(len(dataset.document_indices) - 1, 'document')}, vocabulary {tokenizer.vocab_size:,}: "
           f"{prefix}.bin")
    return Prepared(prefix, tokenizer)


# ---- the cache: one folder for each result, which appears complete ---------------------------------------------------


def cache_folder(cache: str | Path | None) -> Path:
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "shardlab")
    return Path(cache).absolute()


def key(files: Iterable[Path], tokenizer: Tokenizer | None, tokenizer_type: str, vocab_size: int,
        split_sentences: bool) -> str:
    """Hash everything that determines the tokens: every byte of the corpus, and the tokenizer or how it is trained.

    A file's ending may say how documents lie in it, and sentences end by Python's tables of Unicode.
    """
    sources = [(file.suffix, checksum(str(file))) for file in files]
    facts = [tokenizer.fingerprint, tokenizer.eod] if tokenizer else []
    text = json.dumps([RECIPE, tokenizers.__version__, unicodedata.unidata_version, tokenizer_type, vocab_size,
                       split_sentences, facts, sources])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_complete(folder: Path, report: Report) -> bool:
    """Report whether the folder is there, as it was when it appeared; remove one that was damaged since."""
    if not folder.is_dir():
        return False
    with suppress(UserError):
        if read_text(str(folder / CHECKSUMS)) == checksums(folder):
            return True
    report(f"{folder} is damaged, or of an earlier version: its tokens are made again")
    shutil.rmtree(folder)
    return False


def checksums(folder: Path) -> str:
    """Return the checksums of the folder's files, as `xxh128sum` prints them. Raise UserError if one cannot be read."""
    names = filter(lambda name: (folder / name).exists(), ("tokens.bin", "tokens.idx", SAVED))
    return "".join(f"{checksum(str(folder / name))}  {name}\n" for name in names)


def build(folder: Path, corpus: Corpus, tokenizer: Tokenizer | type[TrainedTokenizer], vocab_size: int,
          split_sentences: bool, report: Report) -> None:
    """Make everything in a temporary folder and rename it into place, so that nothing can leave half of it.

    `tokenizer` may be the type of one to be trained first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_aside(str(folder.parent)) as temporary:
        aside = Path(temporary, folder.name)
        aside.mkdir()
        if isinstance(tokenizer, type):
            report(f"training a {vocab_size:,}-token {tokenizer.method} on {corpus}")
            trained = tokenizer.train(report_progress(corpus.documents(), "read", report), vocab_size)
            trained.save(aside / SAVED)
            tokenizer = trained
        report(f"encoding {corpus} with {tokenizer.name}")
        encode = encode_sentences if split_sentences else encode_documents
        documents = encode(report_progress(corpus.documents(), "encoded", report), tokenizer)
        write_indexed(aside / "tokens", documents, tokenizer.vocab_size)
        (aside / CHECKSUMS).write_text(checksums(aside))
        if corpus.skipped:
            file, fault = next(iter(corpus.skipped.items()))
            report(f"skipped {count(len(corpus.skipped), 'file')} without texts; the first, {file}, {fault}")
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # it is there when another job was first, with the same result
                raise
