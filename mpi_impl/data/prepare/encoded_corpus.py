"""All chunks of a corpus, in order: their documents, numbered consecutively, and the place where each was found."""
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from mpi_impl.data.indexed import IndexedDataset
from mpi_impl.data.prepare.chunks import Part
from mpi_impl.data.prepare.encoded_chunk import ChunkReport, report_of


def chunk_folder(work: Path, number: int) -> Path:
    """Return the folder of chunk `number` of a preparation."""
    return work / f"chunk-{number:06d}"


class EncodedCorpus:
    """Chunks whose folders are in `work`: those of `plan` whose report has been appended."""

    def __init__(self, work: Path, plan: Sequence[list[Part]]):
        self.work, self.plan = work, plan
        self.reports: list[ChunkReport] = []
        self.starts = [0]                           # the number of each chunk's first document, and of all documents
        self.lines_before: list[list[int]] = []    # of each chunk's parts: the lines of the file in parts before
        self.lines: Counter[str] = Counter()       # of each file, so far

    def append(self, report: ChunkReport) -> None:
        """Append the report of the next chunk."""
        before = []
        for part, lines in zip(self.plan[len(self.reports)], report.lines, strict=True):
            before.append(self.lines[part.file])
            if part.is_json_lines:
                self.lines[part.file] += lines
        self.lines_before.append(before)
        self.reports.append(replace(report, dropped=[]))     # they stay on the disk
        self.starts.append(self.starts[-1] + report.documents)

    def dropped(self, chunk: int) -> list[tuple[int, int, str, str]]:
        """Return the dropped documents of a chunk: part, line, kind, and reason."""
        return report_of(chunk_folder(self.work, chunk)).dropped

    def place(self, chunk: int, part: int, line: int) -> str:
        """Name the place of a document for a person: 'a.jsonl:17', or 'b.txt' for a whole file."""
        file = self.plan[chunk][part].file
        return f"{file}:{self.lines_before[chunk][part] + line}" if line else file

    def place_of(self, document: int) -> str:
        """Name the place of a remaining document, by its number."""
        chunk = bisect_right(self.starts, document) - 1
        part, line = self.places(chunk)[document - self.starts[chunk]].tolist()
        return self.place(chunk, part, line)

    @lru_cache(maxsize=64)  # noqa: B019  there is one corpus in a run
    def places(self, chunk: int) -> np.ndarray:
        """Return the part and the line of each remaining document of a chunk: int64 [documents, 2]."""
        return np.load(chunk_folder(self.work, chunk) / "places.npy")

    def signatures(self) -> list[np.ndarray]:
        """Return the signatures of all remaining documents, by chunk: uint32 [128, documents] each, memory-mapped."""
        return [np.load(chunk_folder(self.work, chunk) / "signatures.npy", mmap_mode="r") for chunk in self.nonempty()]

    def documents(self) -> Iterator[list[np.ndarray]]:
        """Yield all remaining documents, each as its sequences, memory-mapped."""
        for chunk in self.nonempty():
            dataset = IndexedDataset(chunk_folder(self.work, chunk) / "tokens")
            bounds = dataset.document_indices.tolist()
            for first, end in zip(bounds, bounds[1:]):
                yield [dataset[i] for i in range(first, end)]

    def nonempty(self) -> list[int]:
        """Return the chunks with documents: the others have no data set."""
        return [chunk for chunk, report in enumerate(self.reports) if report.documents]
