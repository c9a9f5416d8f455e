"""A blend of data sets: one endless sequence of samples that takes from each by its weight, `0.3 A 0.7 B`.

Of two data sets, each sample comes from the one that is further behind its share, as in Megatron's BlendedDataset. To
find out which, nobody need count from the start. Say A's share is w. After n samples, A has given the whole number next
to w n: that is what the rule keeps true, for the next sample is A's if otherwise A would be half a sample behind.

    given(n) = floor(w n + 1/2)         sample n is A's if given(n + 1) > given(n), and then it is A's sample given(n);
                                        otherwise it is B's sample n - given(n)

Of more data sets, each half takes the place of one; what falls to a half is divided in the same way between its
quarters, and so on. So the n-th sample is found in as many steps as there are halvings, for any n at once, and all is
exact: weights are fractions.

How far a data set is from its share at most: 1/2 of a sample when there are two. One halving more brings at most 1/2 of
its own, and not more than all of that from above. So it is log2(K) / 2 for K data sets, rounded up before the division:
1 up to four, 3/2 up to eight, however long the sequence. (Megatron's rule for all at once has no such closed form.)
"""
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from reference.errors import UserError

WEIGHT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,30})?")  # "1e999999999" would be a number too, of a billion digits


class Samples(Protocol):
    """What can be blended: an endless sequence of samples for each part."""

    def samples(self, part: str) -> int: ...

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray: ...


def parse_blend(words: Sequence[str]) -> list[tuple[Fraction, str]]:
    """The weights and data sets of `--data-path A` or `--data-path 0.3 A 0.7 B`. Raises UserError for anything else."""
    if len(words) == 1:
        return [(Fraction(1), words[0])]
    given = f"--data-path {' '.join(words)}"
    example = "Give a weight before each, as in --data-path 0.3 A 0.7 B."
    if len(words) % 2:
        raise UserError(f"{given} is no list of weights and data sets: it has {len(words)} words. {example}")
    for weight in words[::2]:
        if not (WEIGHT.fullmatch(weight) and Fraction(weight) > 0):
            raise UserError(f"{given} has {weight} where a weight belongs, a plain number above 0 and below 1e9, such "
                            f"as 30 or 0.25. {example}")
    return [(Fraction(weight), name) for weight, name in zip(words[::2], words[1::2])]


class Blend:
    """Several data sets as one, each with the given weight, of which only the proportions matter.

    Each data set's samples come in its own order: the j-th that it gives is its sample j.
    """

    def __init__(self, datasets: Sequence[Samples], weights: Sequence[Fraction]):
        self.datasets, self.weights = datasets, weights

    def samples(self, part: str) -> int:
        """How many samples the data sets have together in 'train', 'validation' or 'test'."""
        return sum(dataset.samples(part) for dataset in self.datasets)

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Samples first_sample, ..., first_sample + count - 1 of the endless sequence: int64 [count, width].

        Raises UserError if a data set has no sample in the part.
        """
        source, place = deal(np.arange(first_sample, first_sample + count, dtype=object), self.weights)
        asked = np.unique(source).tolist() or [0]       # for no sample at all, of the right width
        rows = np.concatenate([     # what a data set gives is a run of its own sequence
            self.datasets[k].batch(part, int(min(place[source == k], default=0)), int((source == k).sum()))
            for k in asked])
        rows[np.argsort(source, kind="stable")] = rows.copy()
        return rows


def deal(n: np.ndarray, weights: Sequence[Fraction]) -> tuple[np.ndarray, np.ndarray]:
    """Which data set gives each of the samples n (Python's integers, [count]), and which of its own -> int64, object.
    """
    source = np.zeros(len(n), np.int64)
    if len(weights) == 1:
        return source, n
    half = len(weights) // 2
    share = sum(weights[:half], Fraction(0)) / sum(weights)
    given = _nearest(share, n)
    first = _nearest(share, n + 1) > given          # those that fall to the first half
    place = np.where(first, given, n - given)
    source[first], place[first] = deal(place[first], weights[:half])
    source[~first], place[~first] = deal(place[~first], weights[half:])
    source[~first] += half
    return source, place


def _nearest(share: Fraction, n: np.ndarray) -> np.ndarray:
    """The whole numbers next to share x n, halves upwards, in integers of any size."""
    return (2 * share.numerator * n + share.denominator) // (2 * share.denominator)
