"""Tokenizers: byte-level byte-pair encoding, WordPiece, and none at all.

Byte-level BPE (Radford et al. 2019, section 2.2) starts from the 256 bytes and merges the pair that occurs most often,
again and again, until the vocabulary is full. Since every byte is a token, any text can be encoded, and decoding gives
it back unchanged. The vocabulary is trained here, or GPT-2's.

WordPiece (Wu et al. 2016, section 4.1; Devlin et al. 2019) splits text into words and punctuation marks, and each word
into the longest pieces that the vocabulary has, from the left; a piece that continues a word begins with ##. White
space is lost, and a word with a character that is in no piece becomes [UNK] as a whole. The vocabulary is trained here,
or BERT's.
"""
import hashlib
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from tokenizers import Tokenizer as Library, decoders, models, normalizers, pre_tokenizers, trainers

from mpi_impl.data.corpus import kind
from mpi_impl.runtime.files import LARGEST, check_readable, read_text
from reference.errors import UserError

DEFAULT_VOCAB_SIZE = 4096
LARGEST_TRAINED = 1_000_000   # tokens; several times the largest vocabulary in use, and training still fits in memory
LARGEST_ID = 2**31 - 1        # Megatron's widest type for tokens is int32
END_OF_DOCUMENT = "<|endoftext|>"
SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]")    # no merge makes one
BYTES = pre_tokenizers.ByteLevel.alphabet()  # one printable character for each of the 256 bytes
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUES = "##"              # marks a piece that does not begin a word
LARGEST_ALPHABET = 1000       # characters; BERT's vocabulary has about as many


class Tokenizer(Protocol):
    """The interface of a tokenizer: ids lie in [0, vocab_size), and `eod` ends a document.

    Tokenizers that give other ids to a text have other fingerprints.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str
    prefix: Sequence[int] = ()      # special tokens that stand before a text,
    suffix: Sequence[int] = ()      # and after it
    ends: Sequence[int]             # tokens that each end a generated text
    note: str = ""                  # a line about settings that are not followed

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


def encode_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a whole text, with the special tokens that stand before and after it."""
    return [*tokenizer.prefix, *tokenizer.encode(text), *tokenizer.suffix]


class LibraryTokenizer(Tokenizer):
    """The base of the tokenizers of the library `tokenizers`."""

    end_of_document: str
    plain = True                # whether the name of a special token in a text is ordinary text

    def __init__(self, library: Library):
        self.library = library
        self.library.encode_special_tokens = self.plain
        self.library.no_truncation()
        self.library.no_padding()
        vocabulary = library.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = vocabulary[self.end_of_document]
        self.ends = [self.eod]
        self.fingerprint = hashlib.sha256(library.to_str().encode()).hexdigest()[:16]

    def __setstate__(self, state):
        """Restore an option that the library forgets in pickling, on the way to another rank."""
        self.__dict__.update(state)
        self.library.encode_special_tokens = self.plain

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


class TrainedTokenizer(LibraryTokenizer):
    """The base of the tokenizers that are trained on a corpus and kept in one JSON file."""

    method: str             # in words
    smallest: int           # vocabulary that can be trained,
    contents: str           # and what it holds

    @classmethod
    @abstractmethod
    def train(cls, texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> Self:
        """Train on texts; the same texts give the same tokenizer.

        A small corpus runs out of pairs to merge: the tokenizer's vocab_size is then smaller than requested. Raises
        UserError for sizes that `check_size` refuses.
        """

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. Raises UserError if the file is missing or holds something else."""
        text = read_text(str(path))
        with refusing(f"{path} is not a tokenizer saved by this program as {cls.name}",
                      "Give another, or train it again."):
            return cls(Library.from_str(text))

    @classmethod
    def check_size(cls, vocab_size: int) -> None:
        """Raise UserError for a vocabulary too small for what it has to hold, or too large to be trained."""
        if vocab_size < cls.smallest:
            raise UserError(f"--vocab-size {vocab_size} is too small: {cls.contents}. Give {cls.smallest} or more.")
        if vocab_size > LARGEST_TRAINED:
            raise UserError(f"--vocab-size {vocab_size} is too large: a tokenizer that is trained here has at most "
                            f"{LARGEST_TRAINED:,} tokens. Give fewer.")


class ByteLevelBPETokenizer(TrainedTokenizer):
    """Byte-level BPE trained on the corpus."""

    name = "ByteLevelBPETokenizer"
    end_of_document = END_OF_DOCUMENT
    method = "byte-level BPE"
    smallest = len(BYTES) + 1
    contents = f"a byte-level vocabulary holds the {len(BYTES)} bytes and the end-of-document token"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> Self:
        cls.check_size(vocab_size)
        bpe = byte_level(models.BPE())
        bpe.train_from_iterator(texts, trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=sorted(BYTES),
            show_progress=False))
        return cls(bpe)


class GPT2BPETokenizer(LibraryTokenizer):
    """GPT-2's tokenizer, from its vocab.json and merges.txt. Raises UserError if either is missing or invalid."""

    name = "GPT2BPETokenizer"
    end_of_document = END_OF_DOCUMENT

    def __init__(self, vocab_file: str, merge_file: str):
        for option, path in ("--vocab-file", vocab_file), ("--merge-file", merge_file):
            check_file(option, path, "GPT-2's file")
        with refusing(f"--vocab-file {vocab_file} and --merge-file {merge_file} are not GPT-2's vocab.json and "
                      "merges.txt", "Give the pair as it is published."):
            bpe = byte_level(models.BPE.from_file(vocab_file, merge_file))
        if missing := {*BYTES, END_OF_DOCUMENT} - bpe.get_vocab().keys():
            raise UserError(f"--vocab-file {vocab_file} lacks {min(missing)!r}: GPT-2's vocabulary holds the "
                            f"{len(BYTES)} bytes and {END_OF_DOCUMENT}. Give the file as it is published.")
        made = {*BYTES, *(line.replace(" ", "") for line in read_text(merge_file).splitlines())}
        if missing := {token for token in bpe.get_vocab().keys() - made if not SPECIAL_TOKEN.fullmatch(token)}:
            raise UserError(f"--merge-file {merge_file} does not fit --vocab-file {vocab_file}: it has no merge that "
                            f"makes {min(missing)!r}, one of {len(missing):,} such tokens, and texts would get other "
                            "tokens. Give the pair as it is published.")
        super().__init__(bpe)


def byte_level(model: models.BPE) -> Library:
    """Add bytes before the model and text after it; words are split by GPT-2's pattern."""
    bpe = Library(model)
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe


class WordPieceTokenizer(TrainedTokenizer):
    """WordPiece, trained on the corpus or from BERT's vocab.txt. [SEP] ends a document.

    Its subclasses differ in whether they distinguish capital letters and accents.
    """

    lower_case: bool
    end_of_document = "[SEP]"
    method = "WordPiece"
    smallest = 100
    contents = (f"a WordPiece vocabulary holds {', '.join(SPECIAL)}, and each letter once to begin a word and once to "
                "continue it")

    def __init__(self, library: Library):
        vocabulary = library.get_vocab()
        if missing := [token for token in SPECIAL if token not in vocabulary]:
            raise ValueError(f"it lacks {missing[0]}")
        if library.normalizer.lowercase != self.lower_case:
            raise ValueError("it was made for text in " + ("both cases" if self.lower_case else "lower case"))
        super().__init__(library)
        self.pad, _, self.cls, self.sep, self.mask = (vocabulary[token] for token in SPECIAL)
        self.begins_word = np.ones(self.vocab_size, bool)  # [V]; by token id
        self.begins_word[[i for token, i in vocabulary.items() if token.startswith(CONTINUES)]] = False

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> Self:
        """Train as the base class says.

        The vocabulary has the special tokens; each frequent character, once to begin a word and once to continue it;
        and the results of merging the most frequent pair of pieces, again and again.
        """
        cls.check_size(vocab_size)
        library = word_piece(models.WordPiece(unk_token="[UNK]"), cls.lower_case)
        words = count_words(texts, library)
        alphabet = frequent_characters(words, min(LARGEST_ALPHABET, vocab_size // 4))
        # The trainer numbers continuing characters in the order of their appearance, which varies: so they are given in
        # order, as if they were special. The tokenizer, which takes the trainer's vocabulary, has no special ones.
        given = [*SPECIAL, *(CONTINUES + character for character in alphabet)]
        trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=given, show_progress=False)
        known = set(alphabet)
        library.train_from_iterator((f"{word} " * n for word, n in words.items() if known.issuperset(word)), trainer)
        return cls(word_piece(library.model, cls.lower_case))

    @classmethod
    def from_vocab_file(cls, vocab_file: str) -> Self:
        """Read BERT's tokenizer from its vocab.txt, one token in each line. Raise UserError if that fails."""
        check_file("--vocab-file", vocab_file, "BERT's vocab.txt")
        with refusing(f"--vocab-file {vocab_file} is not a vocab.txt like BERT's", "Give the file as it is published."):
            return cls(word_piece(models.WordPiece.from_file(vocab_file, unk_token="[UNK]"), cls.lower_case))


def word_piece(model: models.WordPiece, lower_case: bool) -> Library:
    """Add BERT's splitting into words: no control characters, and punctuation and Chinese characters alone."""
    library = Library(model)
    library.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=CONTINUES)
    return library


def count_words(texts: Iterable[str], library: Library) -> Counter[str]:
    """Count the occurrences of each word."""
    words: Counter[str] = Counter()
    for text in texts:
        plain = library.normalizer.normalize_str(text)
        words.update(word for word, _ in library.pre_tokenizer.pre_tokenize_str(plain))
    return words


def frequent_characters(words: Counter[str], limit: int) -> list[str]:
    """Return at most `limit` characters, sorted; the first ones win ties."""
    counts: Counter[str] = Counter()
    for word, n in words.items():
        for character in word:
            counts[character] += n
    return sorted(sorted(counts, key=lambda character: (-counts[character], character))[:limit])


class BertWordPieceLowerCase(WordPieceTokenizer):
    """A WordPiece tokenizer that converts text to lower case, without accents."""

    name = "BertWordPieceLowerCase"
    lower_case = True


class BertWordPieceCase(WordPieceTokenizer):
    """A WordPiece tokenizer that keeps text as it is written."""

    name = "BertWordPieceCase"
    lower_case = False


class NullTokenizer(Tokenizer):
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
        self.ends = [n]
        self.fingerprint = f"{n} numbers"

    def encode(self, text: str) -> list[int]:
        """Return the numbers in the text. Raise UserError for a word that is not one of the ids."""
        return [self.parse_id(word) for word in text.split()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the numbers in each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the ids as decimal numbers."""
        return " ".join(str(int(i)) for i in ids)

    def parse_id(self, word: str) -> int:
        if word.isdecimal() and int(word) < self.vocab_size:
            return int(word)
        raise UserError(f"NullTokenizer reads token ids from 0 to {self.eod}, and {word[:40]!r} is not one. Give "
                        "numbers, a larger --vocab-size, or another --tokenizer-type.")


@contextmanager
def refusing(problem: str, advice: str) -> Iterator[None]:
    """Turn what the library raises into a UserError. It is written in Rust: a panic is not an Exception of Python."""
    try:
        yield
    except Exception as error:      # the library raises nothing more specific
        raise UserError(f"{problem} ({error}). {advice}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":        # which cannot be imported
            raise
        raise UserError(f"{problem} (the library tokenizers failed: {error}). {advice}") from error


def check_file(option: str, path: str, what: str) -> None:
    """Raise UserError unless this is a file that the library may read, of a plausible size."""
    if kind(option, path) == "nothing":
        raise UserError(f"{option} {path} does not exist. Give the path of {what}.")
    check_readable(path, LARGEST)
