"""An encoded chunk of a corpus: read, tokenized, without bad or short documents, in a folder that appears complete.

    chunk-000017/tokens.bin .idx    the documents that are left, as Megatron's indexed data
                 places.npy         int64 [documents, 2]: the part that each is in, and its line there
                 signatures.npy     uint32 [128, documents], if near-duplicates are asked for: a band is read as a whole
                 report.json        ChunkReport, as text
"""
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from mpi_impl.data.encode import encode_documents, encode_sentences
from mpi_impl.data.indexed import Document, IndexedDataset, write_indexed
from mpi_impl.data.prepare.chunks import Part, documents
from mpi_impl.data.prepare.near_duplicates import PERMUTATIONS, signature
from mpi_impl.data.prepare.options import Recipe
from mpi_impl.data.tokenizer_choice import given_tokenizer
from mpi_impl.runtime.files import LARGEST, check_readable, folder_aside
from mpi_impl.runtime.formats import read_json
from mpi_impl.runtime.tables import count

SHORT = "short"     # the kind of documents that are dropped for having too few tokens

tokenizer_of = lru_cache(maxsize=1)(given_tokenizer)    # a worker reads it once, not for every chunk


@dataclass
class ChunkReport:
    """The counts of a chunk, and its dropped documents."""

    lines: list[int]                    # of each part
    dropped: list[tuple[int, int, str, str]] = field(default_factory=list)     # part, line, kind, why
    documents: int = 0                  # that are kept
    tokens: int = 0                     # in them


def encode_chunk(folder: Path, parts: list[Part], recipe: Recipe) -> ChunkReport:
    """Make the folder of a chunk, with a tokenizer that exists, and return its report.

    Raises UserError for a file that cannot be read, OSError for a folder that cannot be written.
    """
    chunk = Chunk(parts, recipe)
    with folder_aside(str(folder.parent)) as temporary:
        aside = Path(temporary, folder.name)
        aside.mkdir()
        write_indexed(aside / "tokens", chunk.documents(), chunk.tokenizer.vocab_size)
        np.save(aside / "places.npy", np.array(chunk.places, np.int64).reshape(-1, 2))
        if recipe.jaccard:
            signatures = np.array(chunk.signatures, np.uint32).reshape(-1, PERMUTATIONS)
            np.save(aside / "signatures.npy", np.ascontiguousarray(signatures.T))
        (aside / "report.json").write_text(json.dumps(asdict(chunk.report)), "utf-8")
        shutil.rmtree(folder, ignore_errors=True)   # one that was found damaged
        aside.rename(folder)
    return chunk.report


class Chunk:
    """A chunk while its documents are processed."""

    def __init__(self, parts: list[Part], recipe: Recipe):
        tokenizer = tokenizer_of(recipe)
        assert tokenizer is not None
        self.tokenizer, self.parts, self.recipe = tokenizer, parts, recipe
        self.places: list[tuple[int, int]] = []
        self.signatures: list[np.ndarray] = []
        self.report = ChunkReport([0] * len(parts))

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are kept, encoded; the others are in the report."""
        for number, part in enumerate(self.parts):
            for line, text, bad in documents(part):
                self.report.lines[number] = line
                if bad:
                    self.report.dropped.append((number, line, bad.kind, bad.fault))
                elif text:
                    yield from self.keep(text, number, line)

    def keep(self, text: str, part: int, line: int) -> Iterator[Document]:
        encode = encode_sentences if self.recipe.split_sentences else encode_documents
        (document,) = encode([text], self.tokenizer)
        tokens = sum(map(len, document)) if isinstance(document, list) else len(document) - 1   # without its end
        if tokens < max(1, self.recipe.min_tokens):
            self.report.dropped.append((part, line, SHORT, f"has {count(tokens, 'token')}"))
            return
        if self.recipe.jaccard:
            self.signatures.append(signature(text))
        self.places.append((part, line))
        self.report.documents += 1
        self.report.tokens += tokens
        yield document


def report_of(folder: Path) -> ChunkReport:
    """Read a chunk's report. Raises UserError if there is none, or something else."""
    return read_json(str(folder / "report.json"), ChunkReport, LARGEST)


def read_finished(folder: Path, parts: int) -> ChunkReport | None:
    """Return the report of a chunk of `parts` parts if it is there and whole; None if it has to be made."""
    try:
        report = report_of(folder)
        whole = len(report.lines) == parts and report.documents >= 0
        if whole and report.documents:
            whole = len(IndexedDataset(folder / "tokens").document_indices) == report.documents + 1
            for array in folder.glob("*.npy"):
                check_readable(str(array))
                whole = whole and report.documents in np.load(array, mmap_mode="r").shape     # which fits its size
        return report if whole else None
    except (EOFError, ValueError):      # ValueError is a UserError, too
        return None
