"""Samples for a model: what it reads, what it shall predict, and how much each prediction weighs.

A data set gives a sample as a row of whole numbers, so that a batch is one array, which is easy to send. `unpack` makes
a batch of rows.

The loss of a head of the model is sum(weights * losses) / sum(weights), both sums over the *global* batch. A replica
knows its own samples only. So where the weights are not all 1 the replicas must tell one another, before the first
backward, what theirs add up to: a mean of the replicas' means would be another number.
"""
from typing import Any, NamedTuple

import numpy as np

CHOICES = 4      # answers to a question


class GPTBatch(NamedTuple):
    """A row of the data set is s + 1 tokens: windows of a stream of text."""

    tokens: Any            # int64 [b, s]
    targets: Any           # int64 [b, s]: of each token the one that follows
    weights: Any = None    # [b, s], of the targets; None: each weighs 1

    @staticmethod
    def width(seq_length: int) -> int:
        """Numbers in a row."""
        return seq_length + 1

    @classmethod
    def unpack(cls, rows) -> "GPTBatch":
        """int64 [b, width] -> the batch."""
        return cls(rows[:, :-1], rows[:, 1:])

    def weights_of_heads(self, heads) -> list:
        """For each of the heads: of its losses, in their shape."""
        return [np.ones_like(self.targets) if self.weights is None else self.weights]


class BERTBatch(NamedTuple):
    """Two pieces of text, `[CLS] A [SEP] B [SEP]`, some of whose words are masked."""

    tokens: Any         # int64 [b, s], some masked
    token_types: Any    # int64 [b, s]: 0 in A, with [CLS] and its [SEP]; 1 in B, with its [SEP]; 0 in padding
    targets: Any        # int64 [b, s]: the tokens as they were, where they are to be predicted; 0 elsewhere
    weights: Any        # int64 [b, s]: 1 where they are to be predicted; 0 elsewhere
    lengths: Any        # int64 [b]: of each sample; what comes after is padding
    swapped: Any        # int64 [b]: 1 where B stands before A in the text, else 0

    @staticmethod
    def width(seq_length: int) -> int:
        """Numbers in a row."""
        return 4 * seq_length + 2

    def pack(self):
        """-> int64 [b, width]: the rows."""
        return np.concatenate([*self[:4], *(column[:, None] for column in self[4:])], 1)

    @classmethod
    def unpack(cls, rows) -> "BERTBatch":
        """int64 [b, width] -> the batch."""
        s = (rows.shape[1] - 2) // 4
        tokens, token_types, targets, weights = (rows[:, i * s:(i + 1) * s] for i in range(4))
        return cls(tokens, token_types, targets, weights, rows[:, -2].copy(), rows[:, -1].copy())

    def weights_of_heads(self, heads) -> list:
        """For each of the heads: of its losses, in their shape."""
        return [self.weights if head == "lm" else np.ones_like(self.swapped) for head in heads]


class ChoiceBatch(NamedTuple):
    """Questions with several answers to choose from: of each there is one sequence for every answer."""

    tokens: Any         # int64 [b n, s]: the n answers of a question follow one another
    token_types: Any    # int64 [b n, s]
    lengths: Any        # int64 [b n]
    answers: Any        # int64 [b]: which of its n sequences has the right answer
    weights: Any        # int64 [b]: 0 for a question that only fills a batch

    @classmethod
    def width(cls, seq_length: int) -> int:
        """Numbers in a row: a question."""
        return CHOICES * (2 * seq_length + 1) + 2

    def pack(self):
        """-> int64 [b, width]: the rows."""
        b = len(self.answers)
        return np.concatenate([*(x.reshape(b, -1) for x in self[:3]), self.answers[:, None], self.weights[:, None]], 1)

    @classmethod
    def unpack(cls, rows) -> "ChoiceBatch":
        """int64 [b, width] -> the batch."""
        n = CHOICES
        s = ((rows.shape[1] - 2) // n - 1) // 2
        return cls(rows[:, :n * s].reshape(-1, s), rows[:, n * s:2 * n * s].reshape(-1, s),
                   rows[:, 2 * n * s:-2].reshape(-1).copy(), rows[:, -2].copy(), rows[:, -1].copy())

    def weights_of_heads(self, heads) -> list:
        """For each of the heads: of its losses, in their shape."""
        return [self.weights]
