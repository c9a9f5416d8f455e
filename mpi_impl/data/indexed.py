"""Megatron's indexed data: all tokens in one flat file, and the place of each sequence in another.

    PREFIX.bin    the tokens of every sequence, one after another, in one integer type
    PREFIX.idx    9 bytes      the magic string MMIDIDX, two zero bytes
                  uint64       the version of the format, 1
                  uint8        the code of the token type (TOKEN_TYPES)
                  uint64       n, the number of sequences
                  uint64       d, the number of documents + 1
                  int32 [n]    the length of each sequence, in tokens
                  int64 [n]    the start of each sequence in PREFIX.bin, in bytes
                  int64 [d]    the first sequence of each document, and finally n

Every number is little-endian. A document is one sequence, or several if it was split into sentences, which BERT's
samples need.
"""
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mpi_impl.runtime.files import check_readable, checksum, folder_aside, is_there
from reference.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, n, d
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating types, which store no tokens
TOKEN_TYPES = {code: np.dtype(name) for code, name in CODES.items()}

Document = np.ndarray | Sequence[np.ndarray]  # its tokens, 1-D; or those of each of its sentences


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type in which Megatron stores tokens: uint16 for a vocabulary below 65,500, int32 from there on."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


def write_indexed(prefix: str | Path, documents: Iterable[Document], vocab_size: int) -> None:
    """Write PREFIX.bin and PREFIX.idx; only one document is in memory at a time.

    A document is a 1-D integer array, which becomes one sequence, or a list of them, a sequence each. Both files are
    written aside and moved into place when complete, PREFIX.idx last, so that an interruption leaves no pair that can
    be opened. Raises UserError for a token outside the vocabulary.
    """
    dtype, lengths, bounds = token_dtype(vocab_size), array("i"), array("q", [0])
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    with folder_aside(str(bin_path.parent)) as folder:
        aside = Path(folder)
        with open(aside / "bin", "wb") as file:
            for number, document in enumerate(documents):
                for sequence in [document] if isinstance(document, np.ndarray) else document:
                    check_sequence(number, sequence, vocab_size)
                    file.write(sequence.astype(dtype).tobytes())
                    lengths.append(len(sequence))
                bounds.append(len(lengths))
        with open(aside / "idx", "wb") as file:
            write_index(file, np.array(lengths, "<i4"), np.array(bounds, "<i8"), dtype)
        idx_path.unlink(missing_ok=True)  # an old index must not stay with new tokens
        os.replace(aside / "bin", bin_path)
        os.replace(aside / "idx", idx_path)


def check_sequence(number: int, sequence: np.ndarray, vocab_size: int) -> None:
    if sequence.ndim != 1 or sequence.dtype.kind not in "iu":
        raise TypeError(f"Document {number} is not a 1-D array of integers: {sequence.dtype} {list(sequence.shape)}.")
    outside = sequence[(sequence < 0) | (sequence >= vocab_size)]
    if outside.size:
        raise UserError(f"Document {number} holds the token {outside[0]}, outside the vocabulary of {vocab_size:,} "
                        "tokens. Give the vocabulary size of the tokenizer that made it.")


def write_index(file: BinaryIO, lengths: np.ndarray, bounds: np.ndarray, dtype: np.dtype) -> None:
    """Write PREFIX.idx for sequences of int32 [n] tokens, and documents that begin at the sequences int64 [d]."""
    sizes = lengths.astype("<i8") * dtype.itemsize  # in bytes: more than int32 counts
    code = next(code for code, known in TOKEN_TYPES.items() if known == dtype)
    file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(bounds)))
    file.write(lengths.tobytes())
    file.write((np.cumsum(sizes) - sizes).tobytes())
    file.write(bounds.tobytes())


class IndexedDataset:
    """The sequences of PREFIX.bin, memory-mapped: `dataset[i]` is a 1-D view of the tokens of sequence i.

        tokens            [total]          all tokens, in the type they are stored in
        sequence_lengths  int32 [n]        in tokens
        sequence_pointers int64 [n]        in bytes
        document_indices  int64 [docs + 1] document k is the sequences document_indices[k] up to document_indices[k + 1]

    Raises UserError for a missing, foreign, truncated or empty file: sizes are compared before anything is used.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        for path, partner in (bin_path, idx_path), (idx_path, bin_path):
            if not is_there(str(path)):
                raise UserError(f"{path} is missing, and {partner.name} is useless without it. Copy both files.")
            check_readable(str(path))
        try:
            dtype, n, d = read_header(idx_path)
            index = np.memmap(idx_path, np.uint8, "r")
            self.sequence_lengths = np.frombuffer(index, "<i4", n, HEADER.size)
            self.sequence_pointers = np.frombuffer(index, "<i8", n, HEADER.size + 4 * n)
            self.document_indices = np.frombuffer(index, "<i8", d, HEADER.size + 12 * n)
            self.check_index(idx_path, dtype.itemsize)
            check_size(bin_path, int(self.sequence_lengths.sum(dtype=np.int64)) * dtype.itemsize, idx_path)
            self.tokens = np.asarray(np.memmap(bin_path, dtype, "r"))
        except OSError as error:
            raise UserError(f"{prefix}.bin and .idx cannot be read ({error}). Check that you may read them.") from error

    def check_index(self, path: Path, itemsize: int) -> None:
        """Raise UserError unless the sequences lie end to end, the documents are in order, and there is a token."""
        if not self.sequence_lengths.any():
            raise UserError(f"{path} lists no tokens: the data set is empty. Prepare it again from text.")
        sound, end = is_division(self.document_indices, len(self)), 0
        for start, lengths in blocks(self.sequence_lengths):
            ends = end + np.cumsum(lengths, dtype=np.int64) * itemsize
            begins = ends - lengths * np.int64(itemsize)
            pointers = self.sequence_pointers[start:start + len(lengths)]
            sound = sound and bool((lengths >= 0).all() and (pointers == begins).all())
            end = int(ends[-1])
        if not sound:
            raise UserError(f"{path} is damaged: its sequences do not lie end to end, or its documents are not in "
                            "order. Copy it again, or prepare the data again.")

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        """Return the tokens of sequence i."""
        start = self.sequence_pointers[i] // self.tokens.itemsize
        return self.tokens[start : start + self.sequence_lengths[i]]


def is_division(bounds: np.ndarray, n: int) -> bool:
    """Report whether the bounds rise from 0 to n."""
    return len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == n and bool((np.diff(bounds) >= 0).all())


def read_header(path: Path) -> tuple[np.dtype, int, int]:
    """Read the token type, n and d of PREFIX.idx, and check its size against them."""
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise UserError(f"{path} is truncated: it has {len(header)} bytes, and the header takes {HEADER.size}. Copy it "
                        "again.")
    magic, version, code, n, d = HEADER.unpack(header)
    if magic != MAGIC:
        raise UserError(f"{path} is not a Megatron index: it begins with {magic!r}, not {MAGIC!r}. Give another "
                        "prefix.")
    if version != VERSION:
        raise UserError(f"{path} has version {version} of the format, not {VERSION}. Prepare the data again.")
    if code not in TOKEN_TYPES:
        known = ", ".join(f"{code} ({dtype.name})" for code, dtype in TOKEN_TYPES.items())
        raise UserError(f"{path} has the token type {code}; the types that hold tokens are {known}. Prepare it again.")
    check_size(path, HEADER.size + 12 * n + 8 * d, path)
    return TOKEN_TYPES[code], n, d


def check_size(path: Path, expected: int, source: Path) -> None:
    size = path.stat().st_size
    if size != expected:
        fault = "is truncated" if size < expected else "is too long"
        raise UserError(f"{path} {fault}: {source.name} asks for {expected:,} bytes, and it has {size:,}. Copy both "
                        "files again, or prepare the data again.")


def blocks(values: np.ndarray, size: int = 1 << 16) -> Iterator[tuple[int, np.ndarray]]:
    """Yield views of at most `size` elements, each with the index of its first: what is computed of one stays in the
    processor's cache.
    """
    for start in range(0, len(values), size):
        yield start, values[start:start + size]


def fingerprint(prefix: str | Path) -> str:
    """Hash the whole data set. Raise UserError if it cannot be read."""
    return "".join(checksum(f"{prefix}.{suffix}")[:8] for suffix in ("idx", "bin"))
