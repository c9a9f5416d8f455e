"""Samples for a GPT: windows of seq_length + 1 tokens, and which of them a step sees."""
import re
from fractions import Fraction
from functools import lru_cache

import numpy as np

from mpi_impl.data.indexed import IndexedDataset, blocks
from reference.errors import UserError

PARTS = ("train", "validation", "test")
PROPORTION = re.compile(r"[0-9]{1,9}(\.[0-9]{1,30})?")  # "1e999999999" would be a number too, of a billion digits


class GPTDataset:
    """Samples of an indexed data set, in three parts.

    Sample j is the tokens from j * seq_length up to and including (j + 1) * seq_length of the flat token stream:
    inputs and, one further on, targets. So every token is a target once, but for the first and for the fewer than
    seq_length at the end that fill no sample. Documents follow one another with an end-of-document token between, and
    attention runs across it, as by Megatron's default.

    The parts are contiguous ranges of *samples* in the proportions of `split`. Megatron divides documents; but
    then a corpus that is one file would have no validation part.

    Raises UserError for a split that cannot be read and for data too short for one sample.
    """

    def __init__(self, indexed: IndexedDataset, seq_length: int, seed: int, split: str = "969,30,1"):
        self.indexed = indexed
        self.seq_length = seq_length
        self.seed = seed
        self.split = split
        n = (len(indexed.tokens) - 1) // seq_length
        if n < 1:
            raise UserError(
                f"{indexed.prefix}.bin holds {len(indexed.tokens):,} tokens, too few for one sample of --seq-length "
                f"{seq_length} + 1. Give more text or a smaller --seq-length."
            )
        self.ranges = split_samples(split, n)

    def samples(self, part: str) -> int:
        """The number of samples in 'train', 'validation' or 'test'."""
        return len(self.ranges[part])

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Samples first_sample, ..., first_sample + count - 1 of an endless sequence: int64 [count, seq_length + 1].

        The sequence passes through the part again and again: training in another order each epoch, validation and
        test as they lie. It depends on the seed and on nothing else, so ranks may cut it as they like. Raises
        UserError if the part has no sample.
        """
        n = self.samples(part)
        if n == 0:
            total = sum(map(len, self.ranges.values()))
            raise UserError(
                f"The {part} part of {self.indexed.prefix} has no sample: --split {self.split} leaves it none of "
                f"{total:,}. Give it a larger share, more text, or a smaller --seq-length."
            )
        epochs, places = np.divmod(np.arange(first_sample, first_sample + count), n)
        if part == "train":
            for epoch in np.unique(epochs):
                places[epochs == epoch] = shuffled(n, self.seed, int(epoch))[places[epochs == epoch]]
        starts = (self.ranges[part].start + places) * self.seq_length
        window = np.arange(self.seq_length + 1)
        return self.indexed.tokens[starts[:, None] + window].astype(np.int64)  # [count, 1] + [s + 1]

    def targets(self, part: str) -> np.ndarray:
        """All tokens that the part's samples predict, as they lie: [samples * seq_length], in the stored type."""
        samples = self.ranges[part]
        return self.indexed.tokens[samples.start * self.seq_length + 1 : samples.stop * self.seq_length + 1]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Read all tokens once, a block at a time; raises UserError for the first outside [0, vocab_size)."""
        for start, block in blocks(self.indexed.tokens):
            outside = (block < 0) | (block >= vocab_size)
            if outside.any():
                i = int(outside.argmax())
                raise UserError(
                    f"{self.indexed.prefix}.bin holds the token {block[i]} at position {start + i:,}, outside the "
                    f"vocabulary of {vocab_size:,} tokens (0 to {vocab_size - 1:,}): it was made with another "
                    "tokenizer. Give that tokenizer, or the --vocab-size it had."
                )


def split_samples(split: str, n: int) -> dict[str, range]:
    """Divide n samples in the proportions of `split`, up to three numbers as in "969,30,1"; a missing one is 0.

    Raises UserError for anything else, and for proportions that are all 0.
    """
    words = [word.strip() for word in split.split(",")]
    plain = all(PROPORTION.fullmatch(word) for word in words)
    weights = [Fraction(word) for word in words] if plain else []  # exact: "0.9,0.1" does not lose a sample
    if not 1 <= len(weights) <= 3 or not any(weights):
        raise UserError(
            f"--split {split} is not a division into training, validation and test. Give up to three proportions that "
            "are not all 0, each a plain number below 1e9 such as 30 or 0.25: for example 969,30,1."
        )
    bounds = [round(n * sum(weights[:i]) / sum(weights)) for i in range(4)]
    return dict(zip(PARTS, map(range, bounds, bounds[1:]), strict=True))


@lru_cache(maxsize=2)  # a batch may reach over the end of one epoch into the next
def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of n samples in an epoch: int64 [n].

    It sorts raw random bits, which NumPy promises never to change; its own permutations may differ by version. Any
    integer is a seed: the generator takes none below 0, and a negative one counts down from 2^64.
    """
    return np.argsort(np.random.PCG64((seed % 2**64, epoch)).random_raw(n), kind="stable")
