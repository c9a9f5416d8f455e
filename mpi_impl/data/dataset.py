"""The common base of data sets: three parts, the order of samples, and a check of every token."""
import re
from abc import ABC, abstractmethod
from fractions import Fraction
from functools import lru_cache

import numpy as np

from mpi_impl.data.indexed import IndexedDataset, blocks
from reference.errors import UserError

PARTS = ("train", "validation", "test")
PROPORTION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,30})?")  # "1e999999999" would be a number too, of a billion digits


class Dataset(ABC):
    """A base class: `total` samples of an indexed data set, in three parts.

    The parts are contiguous ranges of *samples* in the proportions of `split`. Megatron divides documents; but then a
    corpus that is one file would have no validation part.

    Raises UserError for a split that cannot be read.
    """

    def __init__(self, indexed: IndexedDataset, seq_length: int, seed: int, split: str, total: int):
        self.indexed, self.seq_length, self.seed, self.split = indexed, seq_length, seed, split
        self.ranges = split_samples(split, total)

    @abstractmethod
    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Return samples first_sample, ..., first_sample + count - 1 of the sequence of `order`: int64 [count, n].

        Raises UserError if the part has no sample.
        """

    def samples(self, part: str) -> int:
        """Return the number of samples in 'train', 'validation' or 'test'."""
        return len(self.ranges[part])

    def order(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Return the indices of samples first_sample, ... of an endless sequence: int64 [count].

        The sequence passes through the part again and again: training in another order each epoch, validation and test
        in their stored order. It depends only on the seed, so any rank can compute any part of it. Raises UserError if
        the part has no sample.
        """
        n = self.samples(part)
        if n == 0:
            total = sum(map(len, self.ranges.values()))
            raise UserError(f"The {part} part of {self.indexed.prefix} has no sample: --split {self.split} leaves it "
                            f"none of {total:,}. Give it a larger share, more text, or a smaller --seq-length.")
        if part == "train":
            return self.ranges[part].start + order_of_training(n, self.seed, first_sample, count)
        return self.ranges[part].start + np.arange(first_sample, first_sample + count) % n

    def check_vocabulary(self, vocab_size: int) -> None:
        """Read all tokens once, a block at a time; raise UserError for the first outside [0, vocab_size)."""
        for start, block in blocks(self.indexed.tokens):
            if block.min() < 0 or block.max() >= vocab_size:
                i = int(((block < 0) | (block >= vocab_size)).argmax())
                raise UserError(f"{self.indexed.prefix}.bin holds the token {block[i]} at position {start + i:,}, "
                                f"outside the vocabulary of {vocab_size:,} tokens (0 to {vocab_size - 1:,}): it was "
                                "made with another tokenizer. Give that tokenizer, or the --vocab-size it had.")


def split_samples(split: str, n: int) -> dict[str, range]:
    """Divide n samples in the proportions of `split`, up to three numbers as in "969,30,1"; a missing one is 0.

    Raises UserError for anything else, and for proportions that are all 0.
    """
    words = [word.strip() for word in split.split(",")]
    plain = all(PROPORTION.fullmatch(word) for word in words)
    weights = [Fraction(word) for word in words] if plain else []  # exact: "0.9,0.1" does not lose a sample
    if not 1 <= len(weights) <= 3 or not any(weights):
        raise UserError(f"--split {split} is not a division into training, validation and test. Give up to three "
                        "proportions that are not all 0, each a plain number below 1e9 such as 30 or 0.25: for example "
                        "969,30,1.")
    bounds = [round(n * sum(weights[:i]) / sum(weights)) for i in range(4)]
    return dict(zip(PARTS, map(range, bounds, bounds[1:]), strict=True))


def order_of_training(n: int, seed: int, first_sample: int, count: int) -> np.ndarray:
    """Return samples first_sample, ... of an endless sequence of n, in another order each epoch: int64 [count]."""
    epochs, places = np.divmod(np.arange(first_sample, first_sample + count), n)
    for epoch in range(first_sample // n, (first_sample + count - 1) // n + 1):
        places[epochs == epoch] = shuffle(n, seed, epoch)[places[epochs == epoch]]
    return places


# A batch may reach over the end of an epoch into the next, and each data set of a blend has epochs of its own.
@lru_cache(maxsize=8)
def shuffle(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of n samples in an epoch: int64 [n].

    It sorts raw random bits, which NumPy promises never to change; its own permutations may differ by version. Any
    integer is a seed: the generator takes none below 0, and a negative one counts down from 2^64.
    """
    return np.argsort(np.random.PCG64((seed % 2**64, epoch)).random_raw(n), kind="stable")
