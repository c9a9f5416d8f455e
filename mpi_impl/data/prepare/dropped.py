"""The documents dropped from a corpus: each named in a file, with counts and examples for a person to read."""
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TextIO

import numpy as np

from mpi_impl.data.prepare.encoded_corpus import EncodedCorpus
from mpi_impl.data.prepare.near_duplicates import NearDuplicates

NEAR_DUPLICATE = "near-duplicate"
EXAMPLES = 3    # of each kind


class Dropped:
    """Counts, and the first examples, of each kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = defaultdict(list)

    def write(self, file: TextIO, corpus: EncodedCorpus, duplicates: NearDuplicates | None) -> None:
        """Write a line of JSON for each dropped document, in the order of the corpus."""
        for chunk in range(len(corpus.reports)):
            found = [*corpus.dropped(chunk), *(near_duplicates_in(corpus, chunk, duplicates) if duplicates else ())]
            for part, line, kind, why in sorted(found):
                place = corpus.place(chunk, part, line)
                file.write(json.dumps({"document": place, "dropped": kind, "why": why}) + "\n")
                self.counts[kind] += 1
                if self.counts[kind] <= EXAMPLES:
                    self.examples[kind].append(f"{place} {why}")

    def __str__(self) -> str:
        """List the kinds, most frequent first, each with its count and its examples."""
        lines = []
        for kind, count in self.counts.most_common():
            lines.append(f"dropped {count:,} as {kind}:")
            lines += [f"    {example}" for example in self.examples[kind]]
            lines += ["    ..."] if count > EXAMPLES else []
        return "\n".join(lines)


def near_duplicates_in(corpus: EncodedCorpus, chunk: int,
                       duplicates: NearDuplicates) -> Iterator[tuple[int, int, str, str]]:
    """Yield the near-duplicates in a chunk, in the form of its report."""
    start, stop = corpus.starts[chunk:chunk + 2]
    for document in (start + np.flatnonzero(duplicates.original[start:stop] >= 0)).tolist():
        part, line = corpus.places(chunk)[document - start].tolist()
        original = corpus.place_of(int(duplicates.original[document]))
        yield part, line, NEAR_DUPLICATE, f"is similar to {original}: Jaccard {duplicates.jaccard[document]:.2f}"
