"""Samples that a GPT is scored on: text in which only some tokens are targets.

Perplexity over sliding windows scores each token once, though windows overlap; LAMBADA scores the last word. Both use
excerpts of at most s + 1 tokens, with the scored ones at the end of an excerpt.
"""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from reference.batches import GPTBatch


class ScoredBatch(GPTBatch):
    """A batch for a GPT whose rows hold the weights too: 1 for a scored target, 0 elsewhere, int64 [b, s].

    Excerpts are padded at their ends. Attention is causal, so the values of the padding do not matter.
    """

    __slots__ = ()

    @staticmethod
    def width(seq_length: int) -> int:
        """Return the length of a row."""
        return 3 * seq_length

    def pack(self):
        """Return the rows, int64 [b, width]."""
        return np.concatenate(self, 1)

    @classmethod
    def unpack(cls, rows) -> "ScoredBatch":
        """Make a batch of rows, int64 [b, width]."""
        s = rows.shape[1] // 3
        return cls(*(rows[:, i * s:(i + 1) * s] for i in range(3)))


class Excerpt(NamedTuple):
    """Consecutive tokens of a text, at least two."""

    tokens: np.ndarray    # int64 [n + 1], where n <= s
    asked: int            # the number of scored tokens at its end, at most n


class ScoredDataset:
    """Excerpts in their order, once: the part "test" is the only one.

    `filler` is any token of the vocabulary. A subclass turns a sum over all excerpts into measures.
    """

    name = "excerpts"

    def __init__(self, excerpts: Sequence[Excerpt], seq_length: int, filler: int):
        self.parts = {"test": excerpts}
        self.seq_length, self.filler = seq_length, filler

    def samples(self, part: str) -> int:
        """Return the number of excerpts."""
        return len(self.parts[part])

    def measures(self, total: float) -> tuple[str, dict[str, float]]:
        """Return a line for a person, and numbers by name, from the sum of the task's pass over all excerpts."""
        raise NotImplementedError

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Return samples first_sample, ..., first_sample + count - 1: int64 [count, 3 s], rows of a ScoredBatch.

        Batches have one size, and the last one may reach beyond the end: there the samples begin again, with weights 0.
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
