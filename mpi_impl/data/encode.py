"""The encoder of texts into arrays of token ids, with reports of its progress.

One text is in memory at a time, with its ids: a whole file, or a line of JSON lines. So a corpus may be larger than
memory when it lies in many files or in JSON lines.

The library `tokenizers` takes some 120 bytes for each character that it encodes at once, so a long text is encoded in
pieces, where that provably changes no token: where the tokenizer splits words at blanks before anything else. A text of
any other tokenizer, such as one that puts a blank before each text or composes characters, is encoded whole.
"""
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel

from mpi_impl.data.sentences import split_sentences
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.runtime.tables import count

PIECE = 1 << 20  # characters: a longer document is encoded in pieces, shorter ones together
WORD_END = re.compile(r"\S(?=[ \n])")
SPLITTERS = repr(ByteLevel(add_prefix_space=False)), repr(BertPreTokenizer())
REPORT_EVERY = 5.0  # seconds

Item = TypeVar("Item")


def encode_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield each document as int64 [tokens]: between the tokenizer's prefix and suffix, and the last token is eod."""
    before, after = (np.array(ids, np.int64) for ids in (tokenizer.prefix, tokenizer.suffix))
    end = [] if tokenizer.eod in tokenizer.suffix[-1:] else [[tokenizer.eod]]
    document = [before]
    pieces = split_into_pieces(texts) if splits_at_blanks(tokenizer) else ((text, True) for text in texts)
    for batch in group_by_size(pieces, lambda piece: len(piece[0]), PIECE):     # work for every core
        for ids, (_, is_last) in zip(tokenizer.encode_batch([piece for piece, _ in batch]), batch, strict=True):
            document.append(np.array(ids, np.int64))
            if is_last:
                yield np.concatenate([*document, after, *end])
                document = [before]


def encode_sentences(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[np.ndarray]]:
    """Yield the sentences of each document, int64 [tokens] each, none empty, without an end-of-document token."""
    for text in texts:
        yield [np.array(ids, np.int64) for ids in tokenizer.encode_batch(split_sentences(text)) if ids]


def split_into_pieces(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Split texts into pieces of about PIECE characters; True marks the last piece of a text.

    A piece ends after a word and before the blank.
    """
    for text in texts:
        start = 0
        while word_end := WORD_END.search(text, start + PIECE):
            yield text[start:word_end.end()], False
            start = word_end.end()
        yield text[start:], True


def splits_at_blanks(tokenizer: Tokenizer) -> bool:
    """Report whether no token, and nothing that changes a text before it is split, reaches over the end of a word.

    This holds for GPT-2's pattern and BERT's words, if no text becomes an added token, and for numbers.
    """
    library = getattr(tokenizer, "library", None)
    return library is None or (
        repr(library.pre_tokenizer) in SPLITTERS and isinstance(library.normalizer, BertNormalizer | None)
        and all(token.special and library.encode_special_tokens
                for token in library.get_added_tokens_decoder().values()))


def group_by_size(items: Iterable[Item], size_of: Callable[[Item], int], least: int) -> Iterator[list[Item]]:
    """Yield consecutive items in groups of size `least` together, or a little more; the last may be smaller."""
    found, size = list[Item](), 0
    for item in items:
        found.append(item)
        size += size_of(item)
        if size >= least:
            yield found
            found, size = [], 0
    if found:
        yield found


def report_progress(texts: Iterable[str], done: str, report: Callable[[str], None]) -> Iterator[str]:
    """Yield the texts unchanged, and report every few seconds what is `done` with them."""
    characters, last = 0, time.monotonic()
    for number, text in enumerate(texts, start=1):
        yield text
        characters += len(text)
        if time.monotonic() - last > REPORT_EVERY:
            last = time.monotonic()
            report(f"{done} {count(number, 'document')}, {characters / 1e6:.1f} million characters")
