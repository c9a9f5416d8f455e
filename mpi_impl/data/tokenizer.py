"""From text to tokens and back: byte-level byte-pair encoding, trained here or GPT-2's, and no tokenizer at all.

Byte-level BPE (Radford et al. 2019, section 2.2) starts from the 256 bytes and merges the pair that occurs most
often, again and again, until the vocabulary is full. Since every byte is a token, any text can be encoded, and
decoding gives it back unchanged.
"""
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as BPE
from tokenizers import decoders, models, pre_tokenizers, trainers

from mpi_impl.data.corpus import kind
from reference.errors import UserError

TOKENIZER_TYPES = ("ByteLevelBPETokenizer", "GPT2BPETokenizer", "NullTokenizer")
DEFAULT_VOCAB_SIZE = 4096
LARGEST_TRAINED = 1_000_000   # tokens; several times the largest vocabulary in use, and training still fits in memory
LARGEST_ID = 2**31 - 1        # of a token as it is stored: Megatron's widest type for tokens is int32
END_OF_DOCUMENT = "<|endoftext|>"
BYTES = pre_tokenizers.ByteLevel.alphabet()  # one printable character for each of the 256 bytes


class Tokenizer(Protocol):
    """What the rest of the program asks of a tokenizer: ids lie in [0, vocab_size), and `eod` ends a document.

    Tokenizers that give other ids to a text have other fingerprints.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class BytePairTokenizer:
    """What the two byte-level tokenizers share. No text is encoded as the end-of-document token, not even its name."""

    name: str

    def __init__(self, bpe: BPE):
        self.bpe = bpe
        self.bpe.encode_special_tokens = True  # as ordinary text
        vocabulary = bpe.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = vocabulary[END_OF_DOCUMENT]
        self.fingerprint = hashlib.sha256(bpe.to_str().encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self.bpe.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, in parallel on all cores."""
        return [encoding.ids for encoding in self.bpe.encode_batch_fast(list(texts))]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that a cut left incomplete come out as U+FFFD."""
        return self.bpe.decode([int(i) for i in ids], skip_special_tokens=False)


class ByteLevelBPETokenizer(BytePairTokenizer):
    """Byte-level BPE trained on the corpus and kept in one JSON file."""

    name = "ByteLevelBPETokenizer"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> "ByteLevelBPETokenizer":
        """Train on texts; the same texts give the same tokenizer.

        A small corpus runs out of pairs to merge: the tokenizer's vocab_size is then smaller than asked for. Raises
        UserError if the vocabulary has no room for the 256 bytes and the end-of-document token, or too much of it.
        """
        check_trained_size(vocab_size)
        bpe = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=sorted(BYTES), show_progress=False
        )
        bpe.train_from_iterator(texts, trainer)
        return cls(bpe)

    @classmethod
    def load(cls, path: str | Path) -> "ByteLevelBPETokenizer":
        """Read what `save` wrote. Raises UserError if the file is missing or holds something else."""
        try:
            return cls(BPE.from_file(str(path)))
        except Exception as error:  # the library raises nothing more specific
            raise UserError(f"{path} is not a tokenizer saved by this program ({error}). Train it again.") from error

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file. Raises OSError if it cannot; the library's own save does not tell."""
        Path(path).write_text(self.bpe.to_str(pretty=True), "utf-8", newline="\n")


class GPT2BPETokenizer(BytePairTokenizer):
    """GPT-2's tokenizer, from its vocab.json and merges.txt. Raises UserError if either is missing or invalid."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str, merge_file: str):
        for option, path in ("--vocab-file", vocab_file), ("--merge-file", merge_file):
            if kind(option, path) != "file":
                raise UserError(f"{option} {path} does not exist. Give the path of GPT-2's file.")
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
        """The numbers in the text. Raises UserError for a word that is not one of the ids."""
        return [self._id(word) for word in text.split()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers in each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The ids as decimal numbers."""
        return " ".join(str(int(i)) for i in ids)

    def _id(self, word: str) -> int:
        if word.isdecimal() and int(word) < self.vocab_size:
            return int(word)
        raise UserError(
            f"NullTokenizer reads token ids from 0 to {self.eod}, and {word[:40]!r} is not one. Give numbers, "
            "a larger --vocab-size, or another --tokenizer-type."
        )


def given_tokenizer(
    tokenizer_type: str, vocab_size: int | None, vocab_file: str | None, merge_file: str | None
) -> Tokenizer | None:
    """The tokenizer that the options alone determine, or None for the one that is trained on the corpus.

    Raises UserError for an unknown type, a missing option, and an option that this type would ignore.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise UserError(f"--tokenizer-type {tokenizer_type} is unknown. Give one of {', '.join(TOKENIZER_TYPES)}.")
    if tokenizer_type == "GPT2BPETokenizer":
        return _gpt2_tokenizer(vocab_size, vocab_file, merge_file)
    if vocab_file or merge_file:
        option = "--vocab-file" if vocab_file else "--merge-file"
        raise UserError(f"{option} is for --tokenizer-type GPT2BPETokenizer; {tokenizer_type} reads no such file.")
    if tokenizer_type == "ByteLevelBPETokenizer":
        check_trained_size(DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size)
        return None
    if vocab_size is None:
        raise UserError("--tokenizer-type NullTokenizer needs --vocab-size: the number of token ids in the data.")
    return NullTokenizer(vocab_size)


def check_trained_size(vocab_size: int) -> None:
    """Raises UserError if no byte-level tokenizer of this size can be trained."""
    smallest = len(BYTES) + 1
    if vocab_size < smallest:
        raise UserError(
            f"--vocab-size {vocab_size} is too small: a byte-level vocabulary holds the {len(BYTES)} bytes and the "
            f"end-of-document token. Give {smallest} or more."
        )
    if vocab_size > LARGEST_TRAINED:
        raise UserError(
            f"--vocab-size {vocab_size} is too large: a tokenizer of at most {LARGEST_TRAINED} tokens is trained "
            "here. Give fewer."
        )


def _gpt2_tokenizer(vocab_size: int | None, vocab_file: str | None, merge_file: str | None) -> GPT2BPETokenizer:
    if not (vocab_file and merge_file):
        raise UserError(
            "--tokenizer-type GPT2BPETokenizer needs both --vocab-file (GPT-2's vocab.json) and --merge-file (its "
            "merges.txt)."
        )
    tokenizer = GPT2BPETokenizer(vocab_file, merge_file)
    if vocab_size not in (None, tokenizer.vocab_size):
        raise UserError(
            f"--vocab-size {vocab_size} contradicts --vocab-file {vocab_file}, which holds {tokenizer.vocab_size:,} "
            "tokens. Leave --vocab-size out."
        )
    return tokenizer


def _byte_level(model: models.BPE) -> BPE:
    """Bytes before the model, and back to text after it; words are told apart by GPT-2's pattern."""
    bpe = BPE(model)
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe
