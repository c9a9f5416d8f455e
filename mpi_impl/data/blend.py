"""A blend of data sets: one endless sequence of samples, taken from each in proportion to its weight, `0.3 A 0.7 B`.

The order is that of Megatron's BlendedDataset, to the last sample. After n samples, data set k with share w_k has
given c_k. The next one comes from the data set that is furthest behind, the first of equals:

    argmax_k  w_k max(n, 1) - c_k       in float64, whose rounding decides between data sets that are equally far behind

This rule has no closed form for more than two data sets, so we follow it from the first sample, a block of samples at a
time. The counts c before each block are kept: a blend that has once been at sample n returns to any sample before it at
the cost of a block. A run that resumes at sample n follows n steps first: two seconds or so for each million.
"""
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import numpy as np

from mpi_impl.data.dataset import PROPORTION
from reference.errors import UserError

BLOCK = 1 << 12     # samples


class Samples(Protocol):
    """An endless sequence of samples for each part (train, validation, test). Each is a row (reference/batches.py)."""

    def samples(self, part: str) -> int: ...

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray: ...


def parse_blend(words: Sequence[str]) -> list[tuple[Fraction, str]]:
    """Parse the weights and data sets of `--data-path A` or `--data-path 0.3 A 0.7 B`, or raise UserError."""
    if len(words) == 1:
        return [(Fraction(1), words[0])]
    given = f"--data-path {' '.join(words)}"
    example = "Give a weight before each, as in --data-path 0.3 A 0.7 B."
    if len(words) % 2:
        raise UserError(f"{given} is not a list of weights and data sets: it has {len(words)} words. {example}")
    for weight in words[::2]:
        if not (PROPORTION.fullmatch(weight) and Fraction(weight) > 0):
            raise UserError(f"{given} has {weight} where a weight belongs: a plain number above 0 and below 1e9, such "
                            f"as 30 or 0.25. {example}")
    return [(Fraction(weight), name) for weight, name in zip(words[::2], words[1::2])]


class Blend:
    """Several data sets as one, each with the given weight. Only the proportions of the weights matter.

    Each data set's samples come in its own order: the j-th that it gives is its sample j.
    """

    def __init__(self, datasets: Sequence[Samples], weights: Sequence[Fraction]):
        self.datasets = datasets
        shares = np.array(weights, np.float64)
        for _ in range(2):      # Megatron divides twice, and the second time may change a last bit
            shares /= shares.sum()
        self.shares = tuple(shares.tolist())
        self.given = [(0,) * len(weights)]      # samples that each data set has given before each block

    def samples(self, part: str) -> int:
        """Return the total number of samples of the data sets in 'train', 'validation' or 'test'."""
        return sum(dataset.samples(part) for dataset in self.datasets)

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Return samples first_sample, ..., first_sample + count - 1 of the endless sequence: int64 [count, width].

        Raises UserError if a data set has no sample in the part.
        """
        source, place = self.order(first_sample, count)
        asked = np.unique(source).tolist() or [0]       # for no sample, an array of the right width
        rows = np.concatenate([     # a data set gives a run of its own sequence
            self.datasets[k].batch(part, int(min(place[source == k], default=0)), int((source == k).sum()))
            for k in asked])
        rows[np.argsort(source, kind="stable")] = rows.copy()
        return rows

    def order(self, first_sample: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the data set of each of these samples, and the index of the sample there: int64 [count] each."""
        first, last = first_sample // BLOCK, (first_sample + count) // BLOCK
        while len(self.given) <= last:
            self.given.append(deal(self.shares, self.given[-1], (len(self.given) - 1) * BLOCK)[1])
        blocks = np.concatenate([deal(self.shares, self.given[b], b * BLOCK)[0] for b in range(first, last + 1)])
        source, place = blocks[first_sample - first * BLOCK:][:count].T
        return source, place


@lru_cache(maxsize=8)
def deal(shares: tuple[float, ...], given: tuple[int, ...], first: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the data set and the place there of each sample of the block that begins at `first`, int64 [BLOCK, 2]; and
    the counts after it.
    """
    counts, order = list(given), list[tuple[int, int]]()
    for n in range(first, first + BLOCK):
        behind = [share * n - count for share, count in zip(shares, counts)] if n else shares
        k = behind.index(max(behind))
        order.append((k, counts[k]))
        counts[k] += 1
    return np.array(order, np.int64), tuple(counts)
