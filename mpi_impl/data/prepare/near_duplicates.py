"""Near-duplicates, documents that repeat an earlier one, by signatures of `rensa` and locality-sensitive hashing.

A document is the set of its shingles, all runs of 5 characters in it (as in Megatron's openwebtext recipe). The
similarity of two documents is the Jaccard index of their sets: the size of the intersection over that of the union. A
signature has 128 places, and with just that probability two documents agree in one. This is so for MinHash, the
smallest hash of all shingles in each of 128 random orders (Broder 1997), and for the fast similarity sketch (Dahlgaard
et al. 2017), which rensa computes. So the fraction of places where two documents agree estimates their similarity, to
within 0.04 (one standard deviation, at 0.7).

Not all pairs are compared. A signature is divided into bands, and only documents that agree in a whole band are
compared. At Jaccard 0.7 there are 18 bands of 7 places, which find 79 % of the pairs of similarity 0.7, 92 % at 0.75,
98.5 % at 0.8, and two in ten thousand at 0.2. The estimate then checks these pairs.
"""
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

SHINGLE = 5             # characters
PERMUTATIONS = 128      # places in a signature
FOUND = 0.75            # the least share of the pairs exactly as similar as --jaccard that the bands find


class NearDuplicates(NamedTuple):
    """The earlier document that each is too similar to, with the estimated similarity; or -1, and 0."""

    original: np.ndarray    # int64 [n]
    jaccard: np.ndarray     # float32 [n]


def signature(text: str) -> np.ndarray:
    """Return the signature of a text that is not empty: uint32 [128], the same on every machine."""
    from rensa import RMinHash  # only where near-duplicates are asked for

    sketch = RMinHash(PERMUTATIONS, seed=1)
    sketch.update([text[i:i + SHINGLE] for i in range(max(1, len(text) - SHINGLE + 1))])
    return np.array(sketch.digest(), np.uint32)


def bands_for(jaccard: float) -> list[slice]:
    """Return the places of each band. The longer a band, the fewer pairs are compared in vain, but the fewer found."""
    rows = max((rows for rows in range(1, PERMUTATIONS + 1)
                if 1 - (1 - jaccard ** rows) ** (PERMUTATIONS // rows) >= FOUND), default=1)
    return [slice(end - rows, end) for end in range(rows, PERMUTATIONS + 1, rows)]


def near_duplicates(signatures: Sequence[np.ndarray], jaccard: float) -> NearDuplicates:
    """Choose the documents to drop, from signatures that are the columns of uint32 [128, any], one after another.

    In order, a document is dropped if it is at least `jaccard` similar to one that is kept; the most similar one is
    named, the first wins ties. So the first of a group is always kept, and the result is a function of the documents
    and their order. `jaccard` lies above 0 and is at most 0.99. The signatures may be memory-mapped files: memory holds
    some 35 bytes for each document, and 6,500 for each kept one that has a band in common with another.
    """
    bands = bands_for(jaccard)
    suspected = find_suspects(signatures, bands)
    kept, index = dict[int, np.ndarray](), defaultdict[tuple[int, bytes], list[int]](list)
    found = NearDuplicates(np.full(len(suspected), -1, np.int64), np.zeros(len(suspected), np.float32))
    for number, hashes in signatures_of(signatures, suspected):
        lists = [index[place, hashes[band].tobytes()] for place, band in enumerate(bands)]
        similar = [(np.count_nonzero(kept[other] == hashes) / PERMUTATIONS, -other) for other in set().union(*lists)]
        most, other = max(similar, default=(0.0, 0))
        if most >= jaccard:
            found.original[number], found.jaccard[number] = -other, most
        else:
            kept[number] = hashes.copy()    # a view would hold on to its neighbours
            for agreeing in lists:
                agreeing.append(number)
    return found


def find_suspects(signatures: Sequence[np.ndarray], bands: Sequence[slice]) -> np.ndarray:
    """Return the documents that have a band in common with another: bool [n]. The others need no place in the index."""
    n = sum(part.shape[1] for part in signatures)
    suspected = np.zeros(n, bool)
    for band in bands:
        values = (places for part in signatures for places in np.ascontiguousarray(part[band].T))
        hashes = np.fromiter(map(xxh3_64_intdigest, values), np.uint64, n)
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
