"""Batches of samples: the model's inputs, its targets, and the weight of each prediction.

A data set gives each sample as a row of integers, so that a batch is a single array, which is easy to send. `unpack`
makes a batch of rows.

The loss of a head is sum(weights * losses) / sum(weights), both sums over the *global* batch. A replica sees only its
own samples. So when the weights are not all 1, the replicas must all-reduce the sum of the weights before the first
backward: the mean of the replicas' means is a different number.
"""
from typing import Any, NamedTuple

import numpy as np

from reference.positions import take

CHOICES = 4      # answers to a question


class GPTBatch(NamedTuple):
    """A window of a stream of text. A row of the data set is s + 1 tokens."""

    tokens: Any            # int64 [b, s]
    targets: Any           # int64 [b, s]: the token that follows each token
    weights: Any = None    # [b, s], the targets' weights; None: all are 1

    @staticmethod
    def width(seq_length: int) -> int:
        """Return the length of a row."""
        return seq_length + 1

    @classmethod
    def unpack(cls, rows) -> "GPTBatch":
        """Make a batch of rows, int64 [b, width]."""
        return cls(rows[:, :-1], rows[:, 1:])

    def weights_of_heads(self, heads) -> list:
        """Return, for each head, the weights of its losses, in their shape."""
        return [np.ones_like(self.targets) if self.weights is None else self.weights]

    def at(self, part) -> "GPTBatch":
        """Return what is left for a rank with this SequencePart. Targets are dealt out like tokens: the target of a
        chunk's last token is the first token of the next chunk, which another rank may have.
        """
        return GPTBatch(*(x if x is None else take(x, part.chunks) for x in self))


class BERTBatch(NamedTuple):
    """Two pieces of text, `[CLS] A [SEP] B [SEP]`, with some tokens masked."""

    tokens: Any         # int64 [b, s], some masked
    token_types: Any    # int64 [b, s]: 0 in A, with [CLS] and its [SEP]; 1 in B, with its [SEP]; 0 in padding
    targets: Any        # int64 [b, s]: the original tokens where they must be predicted; 0 elsewhere
    weights: Any        # int64 [b, s]: 1 where they must be predicted; 0 elsewhere
    lengths: Any        # int64 [b]: the length of each sample; the rest is padding
    swapped: Any        # int64 [b]: 1 where B stands before A in the text, else 0
    counted: Any = None     # int64 [b], the weights of `swapped`; None: all are 1

    @staticmethod
    def width(seq_length: int) -> int:
        """Return the length of a row."""
        return 4 * seq_length + 2

    def pack(self):
        """Return the rows, int64 [b, width]."""
        return np.concatenate([*self[:4], *(column[:, None] for column in self[4:6])], 1)

    @classmethod
    def unpack(cls, rows) -> "BERTBatch":
        """Make a batch of rows, int64 [b, width]."""
        s = (rows.shape[1] - 2) // 4
        tokens, token_types, targets, weights = (rows[:, i * s:(i + 1) * s] for i in range(4))
        return cls(tokens, token_types, targets, weights, rows[:, -2].copy(), rows[:, -1].copy())

    def weights_of_heads(self, heads) -> list:
        """Return, for each head, the weights of its losses, in their shape."""
        counted = np.ones_like(self.swapped) if self.counted is None else self.counted
        return [self.weights if head == "lm" else counted for head in heads]

    def at(self, part) -> "BERTBatch":
        """Return what is left for a rank with this SequencePart. Only one rank has the position that tells the order.
        """
        tokens, types, targets, weights = (take(x, part.chunks) for x in self[:4])
        return BERTBatch(tokens, types, targets, weights, self.lengths, self.swapped,
                         np.full_like(self.swapped, part.has_first_position))


class ChoiceBatch(NamedTuple):
    """Multiple-choice questions, with one sequence for each answer."""

    tokens: Any         # int64 [b n, s]: the n answers of a question are adjacent
    token_types: Any    # int64 [b n, s]
    lengths: Any        # int64 [b n]
    answers: Any        # int64 [b]: which of its n sequences has the right answer
    weights: Any        # int64 [b]: 0 for a question that only fills a batch

    @classmethod
    def sequences(cls) -> int:
        """Return n, the number of sequences in a sample."""
        return CHOICES

    @classmethod
    def width(cls, seq_length: int) -> int:
        """Return the length of a row, which is one question."""
        return cls.sequences() * (2 * seq_length + 1) + 2

    def pack(self):
        """Return the rows, int64 [b, width]."""
        b = len(self.answers)
        return np.concatenate([x.reshape(b, -1) for x in self], 1)

    @classmethod
    def unpack(cls, rows):
        """Make a batch of rows, int64 [b, width]."""
        n, rest = cls.sequences(), cls.width(0)
        s = (rows.shape[1] - rest) // (2 * n)
        tokens, types, lengths, answers = (
            x.copy() for x in np.split(rows[:, :-1], [n * s, 2 * n * s, 2 * n * s + n], 1))
        return cls(tokens.reshape(-1, s), types.reshape(-1, s), lengths.reshape(-1), cls.shaped(answers),
                   rows[:, -1].copy())

    @classmethod
    def shaped(cls, answers):
        """Return the answers in their shape, from their columns of the rows."""
        return answers[:, 0]

    def weights_of_heads(self, heads) -> list:
        """Return, for each head, the weights of its losses, in their shape."""
        return [self.weights]

    def at(self, part):
        """Return what is left for a rank with this SequencePart. Only one rank, that of the first position, counts."""
        tokens, types = (take(x, part.chunks) for x in self[:2])
        return self._replace(tokens=tokens, token_types=types, weights=self.weights * part.has_first_position)


class ClassBatch(ChoiceBatch):
    """Texts, or pairs of them, of some classes: one sequence each, and its class as the answer, int64 [b]."""

    __slots__ = ()

    @classmethod
    def sequences(cls) -> int:
        return 1


class SpanBatch(ClassBatch):
    """Questions with a piece of their sequence as the answer: its first and its last position, int64 [b, 2]."""

    __slots__ = ()

    @classmethod
    def width(cls, seq_length: int) -> int:
        return 2 * seq_length + 4

    @classmethod
    def shaped(cls, answers):
        return answers

    def weights_of_heads(self, heads) -> list:
        return [np.stack([self.weights] * 2, 1)]


def number_of_tokens(batch) -> int:
    """Return the number of a batch's tokens, without padding."""
    lengths = getattr(batch, "lengths", None)
    return batch.tokens.size if lengths is None else lengths.sum()
