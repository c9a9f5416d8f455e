"""Samples that a GPT is scored on: text, of which only some tokens are asked for.

Perplexity over sliding windows asks for each token once, though windows overlap; LAMBADA asks for the last word. Both
are excerpts of at most s + 1 tokens, and what is asked for stands at the end of an excerpt.
"""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reference.batches import GPTBatch


class ScoredBatch(GPTBatch):
    """A batch for a GPT whose rows tell the weights too: 1 where a target is asked for, 0 elsewhere, int64 [b, s].

    Excerpts are filled up at their ends. Attention looks back only, and so it does not matter with what.
    """

    __slots__ = ()

    @staticmethod
    def width(seq_length: int) -> int:
        """Numbers in a row."""
        return 3 * seq_length

    def pack(self):
        """-> int64 [b, width]: the rows."""
        return np.concatenate(self, 1)

    @classmethod
    def unpack(cls, rows) -> "ScoredBatch":
        """int64 [b, width] -> the batch."""
        s = rows.shape[1] // 3
        return cls(*(rows[:, i * s:(i + 1) * s] for i in range(3)))


class Excerpt(NamedTuple):
    """Consecutive tokens of a text, at least two."""

    tokens: np.ndarray    # int64 [n + 1], where n <= s
    asked: int            # for how many at its end; at most n


class ScoredDataset:
    """Excerpts in their order, once: the part "test" is the only one.

    `filler` is a token of the vocabulary; which does not matter.
    """

    def __init__(self, excerpts: Sequence[Excerpt], seq_length: int, filler: int):
        self.parts = {"test": excerpts}
        self.seq_length, self.filler = seq_length, filler

    def samples(self, part: str) -> int:
        """The number of excerpts."""
        return len(self.parts[part])

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Samples first_sample, ..., first_sample + count - 1: int64 [count, 3 s], rows of a ScoredBatch.

        Batches have one size, and the last one may reach beyond the end: there the samples begin again, and nothing of
        them is asked for.
        """
        excerpts, shape = self.parts[part], (count, self.seq_length)
        batch = ScoredBatch(np.full(shape, self.filler), np.full(shape, self.filler), np.zeros(shape, np.int64))
        for row, sample in enumerate(range(first_sample, first_sample + count)):
            tokens, asked = excerpts[sample % len(excerpts)]
            n = len(tokens) - 1
            batch.tokens[row, :n] = tokens[:-1]
            batch.targets[row, :n] = tokens[1:]
            batch.weights[row, n - asked:n] = sample < len(excerpts)
        return batch.pack()
