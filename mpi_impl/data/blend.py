"""A blend of data sets: one endless sequence of samples, taken from each in proportion to its weight, `0.3 A 0.7 B`.

With two data sets, each sample comes from the one that is further behind its share, as in Megatron's BlendedDataset. A
closed form finds it without counting from the start. Say A's share is w. After n samples, A has given the integer
nearest to w n: the rule keeps this true, for the next sample is A's if otherwise A would be half a sample behind.

    given(n) = floor(w n + 1/2)         sample n is A's if given(n + 1) > given(n), and then it is A's sample given(n);
                                        otherwise it is B's sample n - given(n)

With more data sets, each half takes the place of one; the samples of a half are divided in the same way between its
quarters, and so on. So the n-th sample is found in one step for each halving, for any n, and all is exact: weights are
fractions.

A data set is at most 1/2 of a sample from its share when there are two. One halving more adds at most 1/2 of its own to
the error from above. So it is log2(K) / 2 for K data sets, rounded up before the division: 1 up to four, 3/2 up to
eight, however long the sequence. (Megatron's rule for K data sets has no such closed form.)
"""
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from mpi_impl.data.dataset import PROPORTION
from reference.errors import UserError


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
        self.datasets, self.weights = datasets, weights

    def samples(self, part: str) -> int:
        """Return the total number of samples of the data sets in 'train', 'validation' or 'test'."""
        return sum(dataset.samples(part) for dataset in self.datasets)

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Return samples first_sample, ..., first_sample + count - 1 of the endless sequence: int64 [count, width].

        Raises UserError if a data set has no sample in the part.
        """
        source, place = deal(np.arange(first_sample, first_sample + count, dtype=object), self.weights)
        asked = np.unique(source).tolist() or [0]       # for no sample, an array of the right width
        rows = np.concatenate([     # a data set gives a run of its own sequence
            self.datasets[k].batch(part, int(min(place[source == k], default=0)), int((source == k).sum()))
            for k in asked])
        rows[np.argsort(source, kind="stable")] = rows.copy()
        return rows


def deal(n: np.ndarray, weights: Sequence[Fraction]) -> tuple[np.ndarray, np.ndarray]:
    """Return the data set of each sample in n (Python's integers, [count]), and the index there: int64, object."""
    source = np.zeros(len(n), np.int64)
    if len(weights) == 1:
        return source, n
    half = len(weights) // 2
    share = sum(weights[:half], Fraction(0)) / sum(weights)
    given = nearest(share, n)
    first = nearest(share, n + 1) > given          # the samples of the first half
    place = np.where(first, given, n - given)
    source[first], place[first] = deal(place[first], weights[:half])
    source[~first], place[~first] = deal(place[~first], weights[half:])
    source[~first] += half
    return source, place


def nearest(share: Fraction, n: np.ndarray) -> np.ndarray:
    """Return the integers nearest to share x n, halves upwards, in integers of any size."""
    return (2 * share.numerator * n + share.denominator) // (2 * share.denominator)
