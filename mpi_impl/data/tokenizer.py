"""Tokenizers: byte-level byte-pair encoding, WordPiece, and none at all.

Byte-level BPE (Radford et al. 2019, section 2.2) starts from the 256 bytes and merges the pair that occurs most often,
again and again, until the vocabulary is full. Since every byte is a token, any text can be encoded, and decoding gives
it back unchanged. It is trained here, or GPT-2's.

WordPiece (Wu et al. 2016, section 4.1; Devlin et al. 2019) splits text into words and punctuation marks, and each word
into the longest pieces that the vocabulary has, from the left; a piece that continues a word is written with ## in
front. White space is lost, and a word with a character that is in no piece is [UNK] as a whole. It is trained here, or
BERT's.
"""
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np
from tokenizers import Tokenizer as Library, decoders, models, normalizers, pre_tokenizers, trainers

from mpi_impl.data.corpus import kind
from mpi_impl.runtime.files import LARGEST, check_readable, read_text
from reference.errors import UserError

DEFAULT_VOCAB_SIZE = 4096
LARGEST_TRAINED = 1_000_000   # tokens; several times the largest vocabulary in use, and training still fits in memory
LARGEST_ID = 2**31 - 1        # of a stored token: Megatron's widest type for tokens is int32
END_OF_DOCUMENT = "<|endoftext|>"
BYTES = pre_tokenizers.ByteLevel.alphabet()  # one printable character for each of the 256 bytes
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUES = "##"              # marks a piece that does not begin a word
SMALLEST_WORDPIECE = 100      # tokens; the special ones, and both forms of a language's letters
LARGEST_ALPHABET = 1000       # characters; BERT's vocabulary has about as many


class Tokenizer(Protocol):
    """The interface of a tokenizer: ids lie in [0, vocab_size), and `eod` ends a document.

    Tokenizers that give other ids to a text have other fingerprints.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class LibraryTokenizer:
    """The base of the tokenizers of the library `tokenizers`. No text becomes a special token, not even its name."""

    name: str

    def __init__(self, library: Library, end_of_document: str):
        self.library = library
        self.library.encode_special_tokens = True  # as ordinary text
        vocabulary = library.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = vocabulary[end_of_document]
        self.fingerprint = hashlib.sha256(library.to_str().encode()).hexdigest()[:16]

    def __setstate__(self, state):
        """Restore an option that the library forgets in pickling, on the way to another rank."""
        self.__dict__.update(state)
        self.library.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self.library.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, in parallel on all cores."""
        return [encoding.ids for encoding in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; incomplete bytes at the ends become U+FFFD."""
        return self.library.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file. Raise OSError if that fails; the library's own save does not."""
        Path(path).write_text(self.library.to_str(pretty=True), "utf-8", newline="\n")


class BytePairTokenizer(LibraryTokenizer):
    """The base of the two byte-level tokenizers."""

    def __init__(self, bpe: Library):
        super().__init__(bpe, END_OF_DOCUMENT)


class ByteLevelBPETokenizer(BytePairTokenizer):
    """Byte-level BPE trained on the corpus and kept in one JSON file."""

    name = "ByteLevelBPETokenizer"
    method = "byte-level BPE"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> Self:
        """Train on texts; the same texts give the same tokenizer.

        A small corpus runs out of pairs to merge: the tokenizer's vocab_size is then smaller than asked for. Raises
        UserError for what `check_size` refuses.
        """
        cls.check_size(vocab_size)
        bpe = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=sorted(BYTES), show_progress=False
        )
        bpe.train_from_iterator(texts, trainer)
        return cls(bpe)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. Raises UserError if the file is missing or holds something else."""
        return _read_saved(cls, path, cls.name)

    @classmethod
    def check_size(cls, vocab_size: int) -> None:
        """Raise UserError if the vocabulary has no room for bytes and the end of a document, or too much room."""
        smallest = len(BYTES) + 1
        if vocab_size < smallest:
            raise UserError(
                f"--vocab-size {vocab_size} is too small: a byte-level vocabulary holds the {len(BYTES)} bytes and the "
                f"end-of-document token. Give {smallest} or more."
            )
        _check_not_too_large(vocab_size)


class GPT2BPETokenizer(BytePairTokenizer):
    """GPT-2's tokenizer, from its vocab.json and merges.txt. Raises UserError if either is missing or invalid."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str, merge_file: str):
        for option, path in ("--vocab-file", vocab_file), ("--merge-file", merge_file):
            check_file(option, path, "GPT-2's file")
        try:
            bpe = _byte_level(models.BPE.from_file(vocab_file, merge_file))
        except Exception as error:  # the library raises nothing more specific
            raise UserError(
                f"--vocab-file {vocab_file} and --merge-file {merge_file} are not GPT-2's vocab.json and merges.txt "
                f"({error}). Give the pair as it is published."
            ) from error
        missing = {*BYTES, END_OF_DOCUMENT} - bpe.get_vocab().keys()
        if missing:
            raise UserError(
                f"--vocab-file {vocab_file} lacks {min(missing)!r}: GPT-2's vocabulary holds the {len(BYTES)} bytes "
                f"and {END_OF_DOCUMENT}. Give the file as it is published."
            )
        super().__init__(bpe)


class WordPieceTokenizer(LibraryTokenizer):
    """WordPiece, trained on the corpus and kept in one JSON file, or from BERT's vocab.txt. [SEP] ends a document.

    Its subclasses differ in whether they distinguish capital letters and accents.
    """

    lower_case: bool
    method = "WordPiece"

    def __init__(self, library: Library):
        vocabulary = library.get_vocab()
        if missing := [token for token in SPECIAL if token not in vocabulary]:
            raise ValueError(f"it lacks {missing[0]}")
        if library.normalizer.lowercase != self.lower_case:
            raise ValueError("it was made for text in " + ("both cases" if self.lower_case else "lower case"))
        super().__init__(library, "[SEP]")
        self.pad, _, self.cls, self.sep, self.mask = (vocabulary[token] for token in SPECIAL)
        self.begins_word = np.ones(self.vocab_size, bool)  # [V]; by token id
        self.begins_word[[i for token, i in vocabulary.items() if token.startswith(CONTINUES)]] = False

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> Self:
        """Train on texts; the same texts give the same tokenizer.

        The vocabulary has the special tokens; each frequent character, once to begin a word and once to continue it;
        and the results of merging the most frequent pair of pieces, again and again. A small corpus runs out of pairs:
        vocab_size is then smaller than requested. Raises UserError for sizes that `check_size` refuses.
        """
        cls.check_size(vocab_size)
        library = _word_piece(models.WordPiece(unk_token="[UNK]"), cls.lower_case)
        words = _counted_words(texts, library)
        alphabet = _frequent_characters(words, min(LARGEST_ALPHABET, vocab_size // 4))
        # The trainer numbers continuing characters in the order of their appearance, which varies: so they are given in
        # order, as if they were special. The tokenizer, which takes the trainer's vocabulary, has no special ones.
        given = [*SPECIAL, *(CONTINUES + character for character in alphabet)]
        trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=given, show_progress=False)
        known = set(alphabet)
        library.train_from_iterator((f"{word} " * n for word, n in words.items() if known.issuperset(word)), trainer)
        return cls(_word_piece(library.model, cls.lower_case))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. Raises UserError if the file is missing or holds something else."""
        return _read_saved(cls, path, cls.name)

    @classmethod
    def from_vocab_file(cls, vocab_file: str) -> Self:
        """Read BERT's tokenizer from its vocab.txt, one token in each line. Raise UserError if that fails."""
        check_file("--vocab-file", vocab_file, "BERT's vocab.txt")
        try:
            return cls(_word_piece(models.WordPiece.from_file(vocab_file, unk_token="[UNK]"), cls.lower_case))
        except Exception as error:  # the library raises nothing more specific
            raise UserError(
                f"--vocab-file {vocab_file} is not a vocab.txt as BERT's ({error}). Give the file as it is published."
            ) from error

    @classmethod
    def check_size(cls, vocab_size: int) -> None:
        """Raise UserError if the vocabulary has no room for special tokens and characters, or too much room."""
        if vocab_size < SMALLEST_WORDPIECE:
            raise UserError(
                f"--vocab-size {vocab_size} is too small: a WordPiece vocabulary holds {', '.join(SPECIAL)}, and each "
                f"letter once to begin a word and once to go on with it. Give {SMALLEST_WORDPIECE} or more."
            )
        _check_not_too_large(vocab_size)


class BertWordPieceLowerCase(WordPieceTokenizer):
    """A WordPiece tokenizer that converts text to lower case, without accents."""

    name = "BertWordPieceLowerCase"
    lower_case = True


class BertWordPieceCase(WordPieceTokenizer):
    """A WordPiece tokenizer that keeps text as it is written."""

    name = "BertWordPieceCase"
    lower_case = False


class NullTokenizer:
    """Megatron's tokenizer for data whose ids are given: 0 to n - 1, and n for the end of a document, n + 1 in all.

    Its 'text' is the ids as decimal numbers with blanks between.
    """

    name = "NullTokenizer"

    def __init__(self, n: int):
        if n < 1:
            raise UserError(f"--vocab-size {n} leaves no token. Give the number of token ids in the data.")
        if n > LARGEST_ID:
            raise UserError(f"--vocab-size {n} is too large: token ids are stored as 32-bit numbers. Give at most "
                            f"{LARGEST_ID}.")
        self.vocab_size = n + 1
        self.eod = n
        self.fingerprint = f"{n} numbers"

    def encode(self, text: str) -> list[int]:
        """Return the numbers in the text. Raise UserError for a word that is not one of the ids."""
        return [self._id(word) for word in text.split()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the numbers in each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids as decimal numbers."""
        return " ".join(str(int(i)) for i in ids)

    def _id(self, word: str) -> int:
        if word.isdecimal() and int(word) < self.vocab_size:
            return int(word)
        raise UserError(
            f"NullTokenizer reads token ids from 0 to {self.eod}, and {word[:40]!r} is not one. Give numbers, "
            "a larger --vocab-size, or another --tokenizer-type."
        )


TrainedTokenizer = ByteLevelBPETokenizer | WordPieceTokenizer
TRAINED: dict[str, type[TrainedTokenizer]] = {
    tokenizer.name: tokenizer for tokenizer in (ByteLevelBPETokenizer, BertWordPieceLowerCase, BertWordPieceCase)
}
FILES = {  # from which a tokenizer may be read, by its type
    "ByteLevelBPETokenizer": {"--tokenizer-model"},
    "GPT2BPETokenizer": {"--vocab-file", "--merge-file"},
    "BertWordPieceLowerCase": {"--vocab-file", "--tokenizer-model"},
    "BertWordPieceCase": {"--vocab-file", "--tokenizer-model"},
    "NullTokenizer": set(),
}
TOKENIZER_TYPES = tuple(FILES)


def trained_type(tokenizer_type: str) -> type[TrainedTokenizer]:
    """Return the class of a tokenizer that can be trained, with `train`, `load`, `save`, and `method`, in words."""
    return TRAINED[tokenizer_type]


def given_tokenizer(
    tokenizer_type: str,
    vocab_size: int | None,
    vocab_file: str | None,
    merge_file: str | None,
    tokenizer_model: str | None = None,
) -> Tokenizer | None:
    """Return the tokenizer that the options alone determine, or None for one that `trained_type` trains on the corpus.

    `tokenizer_model` is the file of a tokenizer that was trained before. Raises UserError for an unknown type, a
    missing option, and an option that this type would ignore.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise UserError(f"--tokenizer-type {tokenizer_type} is unknown. Give one of {', '.join(TOKENIZER_TYPES)}.")
    files = {"--vocab-file": vocab_file, "--merge-file": merge_file, "--tokenizer-model": tokenizer_model}
    given = {option: path for option, path in files.items() if path}
    _check_files(tokenizer_type, given)
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size: the number of token ids in the data.")
        return NullTokenizer(vocab_size)
    if not given:
        trained_type(tokenizer_type).check_size(DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size)
        return None
    tokenizer = _read_tokenizer(tokenizer_type, given)
    if vocab_size not in (None, tokenizer.vocab_size):
        option, path = next(iter(given.items()))
        raise UserError(
            f"--vocab-size {vocab_size} contradicts {option} {path}, which holds {tokenizer.vocab_size:,} tokens. "
            "Leave --vocab-size out."
        )
    return tokenizer


def _check_files(tokenizer_type: str, given: dict[str, str]) -> None:
    """Check `given`, options and their paths. Raise UserError if the type reads others, or fewer, or more."""
    for option in given:
        if option not in FILES[tokenizer_type]:
            readers = " or ".join(name for name, options in FILES.items() if option in options)
            raise UserError(f"{option} is for --tokenizer-type {readers}; {tokenizer_type} reads no such file.")
    if tokenizer_type == "GPT2BPETokenizer" and len(given) < 2:
        raise UserError(
            "--tokenizer-type GPT2BPETokenizer needs both --vocab-file (GPT-2's vocab.json) and --merge-file (its "
            "merges.txt)."
        )
    if {"--vocab-file", "--tokenizer-model"} <= given.keys():
        raise UserError("--vocab-file and --tokenizer-model both name a tokenizer. Leave one of the two out.")


def _read_tokenizer(tokenizer_type: str, given: dict[str, str]) -> Tokenizer:
    if tokenizer_type == "GPT2BPETokenizer":
        return GPT2BPETokenizer(given["--vocab-file"], given["--merge-file"])
    trained = trained_type(tokenizer_type)
    if issubclass(trained, WordPieceTokenizer) and "--vocab-file" in given:
        return trained.from_vocab_file(given["--vocab-file"])
    return trained.load(given["--tokenizer-model"])


def _check_not_too_large(vocab_size: int) -> None:
    if vocab_size > LARGEST_TRAINED:
        raise UserError(
            f"--vocab-size {vocab_size} is too large: a tokenizer of at most {LARGEST_TRAINED} tokens is trained "
            "here. Give fewer."
        )


def check_file(option: str, path: str, what: str) -> None:
    """Raise UserError unless this is a file that the library may read, of a plausible size."""
    if kind(option, path) == "nothing":
        raise UserError(f"{option} {path} does not exist. Give the path of {what}.")
    check_readable(path, LARGEST)


Saved = TypeVar("Saved")


def _read_saved(tokenizer_of: Callable[[Library], Saved], path: str | Path, name: str) -> Saved:
    """Read the tokenizer in the file. Raise UserError if that fails."""
    text = read_text(str(path))
    try:
        return tokenizer_of(Library.from_str(text))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(
            f"{path} is not a tokenizer saved by this program as {name} ({error}). Give another, or train it again."
        ) from error


def _byte_level(model: models.BPE) -> Library:
    """Add bytes before the model and text after it; words are split by GPT-2's pattern."""
    bpe = Library(model)
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _word_piece(model: models.WordPiece, lower_case: bool) -> Library:
    """Add BERT's splitting into words: no control characters, and punctuation and Chinese characters alone."""
    library = Library(model)
    library.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=CONTINUES)
    return library


def _counted_words(texts: Iterable[str], library: Library) -> Counter[str]:
    """Count the occurrences of each word."""
    words: Counter[str] = Counter()
    for text in texts:
        plain = library.normalizer.normalize_str(text)
        words.update(word for word, _ in library.pre_tokenizer.pre_tokenize_str(plain))
    return words


def _frequent_characters(words: Counter[str], limit: int) -> list[str]:
    """Return at most `limit` characters, sorted; the first ones win ties."""
    counts: Counter[str] = Counter()
    for word, n in words.items():
        for character in word:
            counts[character] += n
    return sorted(sorted(counts, key=lambda character: (-counts[character], character))[:limit])
