"""Near-duplicates, documents that repeat an earlier one, by MinHash and locality-sensitive hashing in `datasketch`.

A document is the set of its shingles, all runs of 5 characters in it (as in Megatron's openwebtext recipe). The
similarity of two documents is the Jaccard index of their sets: the size of the intersection over that of the union. A
random order of all shingles puts the same one first in both sets with just that probability (Broder 1997). So a
signature, the first shingle in each of 128 orders, estimates it: by the fraction of places where two signatures agree,
to within 0.04 (one standard deviation, at 0.7).

Not all pairs are compared. A signature is divided into bands, and only documents that agree in a whole band of it are
compared. At Jaccard 0.7 datasketch chooses 18 bands of 7 places, which finds 79 % of the pairs of similarity 0.7, 92 %
at 0.75, 98.5 % at 0.8, and two in ten thousand at 0.2. The estimate then checks these pairs.
"""
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:       # its import takes a second: it is left to the functions that need it
    from datasketch import MinHash

SHINGLE = 5             # characters
PERMUTATIONS = 128      # orders of the shingles, hence places in a signature
MULTIPLIER = 0x9E3779B97F4A7C15          # odd and far from round numbers: 2^64 divided by the golden ratio
BLOCK = 4096            # shingles at a time, whose 128 places stay in the cache
MISSES_WEIGH = 0.8      # the weight of datasketch's misses. Its other error, a needless comparison, costs only time


class NearDuplicates(NamedTuple):
    """The earlier document that each is too similar to, with the estimated similarity; or -1, and 0."""

    original: np.ndarray    # int64 [n]
    jaccard: np.ndarray     # float32 [n]


def signature(text: str) -> np.ndarray:
    """Return the MinHash of a text that is not empty: uint32 [128], the same on every machine."""
    sketch = empty_sketch().copy()
    shingles = hash_shingles(text)
    for start in range(0, len(shingles), BLOCK):
        sketch.update_batch(shingles[start:start + BLOCK].tolist())
    return sketch.hashvalues


@cache
def empty_sketch() -> "MinHash":
    """Return the sketch of no shingles, with the orders that all signatures share."""
    from datasketch import MinHash

    return MinHash(PERMUTATIONS, seed=1, hashfunc=int, scheme="affine32")


def hash_shingles(text: str) -> np.ndarray:
    """Return a number for each distinct shingle of the text: uint32 [shingles]. A text too short for one is one."""
    characters = np.frombuffer(text.encode("utf-32-le"), "<u4")
    characters = np.pad(characters, (0, max(0, SHINGLE - len(characters))))
    count = len(characters) - SHINGLE + 1
    numbers = mix([characters[i:i + count] for i in range(SHINGLE)])
    ordered = np.sort((numbers >> np.uint64(32)).astype(np.uint32))
    return ordered[np.append(True, ordered[1:] != ordered[:-1])]    # five times as fast as np.unique


def mix(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Hash each row of the columns: uint64 [rows], modulo 2^64."""
    mixed = np.zeros(columns[0].shape, np.uint64)
    for column in columns:
        mixed = (mixed + column + np.uint64(1)) * np.uint64(MULTIPLIER)
        mixed ^= mixed >> np.uint64(29)
    return mixed * np.uint64(MULTIPLIER)


def near_duplicates(signatures: Sequence[np.ndarray], jaccard: float) -> NearDuplicates:
    """Choose the documents to drop, from signatures that are the columns of uint32 [128, any], one after another.

    In order, a document is dropped if it is at least `jaccard` similar to one that is kept; the most similar one is
    named, the first wins ties. So the first of a group is always kept, and the result is a function of the documents
    and their order. `jaccard` lies above 0 and is at most 0.99. The signatures may be memory-mapped files: memory holds
    some 35 bytes for each document, and 6,500 for each kept one that has a band in common with another.
    """
    from datasketch import MinHashLSH

    index = MinHashLSH(jaccard, PERMUTATIONS, weights=(1 - MISSES_WEIGH, MISSES_WEIGH))
    suspected = find_suspects(signatures, index.b, index.r)
    kept: dict[int, np.ndarray] = {}    # those in the index
    found = NearDuplicates(np.full(len(suspected), -1, np.int64), np.zeros(len(suspected), np.float32))
    for number, hashes in signatures_of(signatures, suspected):
        sketch = empty_sketch().copy()
        sketch.hashvalues = hashes
        similar = [(np.count_nonzero(kept[other] == hashes) / PERMUTATIONS, -other) for other in index.query(sketch)]
        most, other = max(similar, default=(0.0, 0))
        if most >= jaccard:
            found.original[number], found.jaccard[number] = -other, most
        else:
            index.insert(number, sketch, check_duplication=False)
            kept[number] = hashes.copy()    # a view would hold on to its neighbours
    return found


def find_suspects(signatures: Sequence[np.ndarray], bands: int, rows: int) -> np.ndarray:
    """Return the documents that have a band in common with another: bool [n]. The others need no place in the index."""
    n = sum(part.shape[1] for part in signatures)
    suspected = np.zeros(n, bool)
    for band in range(bands):
        places = range(band * rows, (band + 1) * rows)
        hashes = np.concatenate([np.empty(0, np.uint64),
                                 *(mix([part[place] for place in places]) for part in signatures)])
        ordered = np.sort(hashes)
        suspected |= np.isin(hashes, ordered[1:][ordered[1:] == ordered[:-1]])
    return suspected


def signatures_of(signatures: Sequence[np.ndarray], wanted: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number and the signature, uint32 [128], of each document that is wanted."""
    first = 0
    for part in signatures:
        here = np.flatnonzero(wanted[first : first + part.shape[1]])
        yield from zip((first + here).tolist(), np.ascontiguousarray(part[:, here].T))
        first += part.shape[1]
