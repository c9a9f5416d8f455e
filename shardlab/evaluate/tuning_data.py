"""The samples of a task that a BERT is tuned on: rows of two texts, and the accuracy of its answers."""
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.data.dataset import order_of_training
from mpi_impl.data.tokenizer import WordPieceTokenizer
from reference.batches import ChoiceBatch, ClassBatch


class Sample(NamedTuple):
    """The tokens of a sample. Rows are made of them on demand: those of all samples would fill gigabytes."""

    firsts: "Sequence[array[int]]"      # what its sequences begin with: a question with each option, or one sentence
    second: "array[int]"                # what follows in all of them: the passage, or another sentence
    answer: Any                         # the index of the right option, the class, or two positions


class TuningDataset:
    """Samples by part and, within each part, by level, such as a kind of school: {"test": {"middle": [...], ...}}.

    A part's samples are those of its levels, in order. Subclasses read them, from a folder of the published files.
    """

    batch_type: type[ChoiceBatch] = ClassBatch

    def __init__(self, tokenizer: WordPieceTokenizer, seq_length: int, seed: int,
                 levels: dict[str, dict[str, list[Sample]]]):
        self.tokenizer, self.seq_length, self.seed, self.levels = tokenizer, seq_length, seed, levels
        self.parts = {part: [sample for level in by_level.values() for sample in level]
                      for part, by_level in levels.items()}

    def samples(self, part: str) -> int:
        """Return the number of samples."""
        return len(self.parts[part])

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Return samples first_sample, ..., first_sample + count - 1: int64 [count, width], rows of a `batch_type`.

        Training passes through its part again and again, in another order each epoch, which depends only on the seed.
        The other parts are passed through once, in their stored order: beyond their ends they begin again, with weights
        0.
        """
        n, samples = self.samples(part), np.arange(first_sample, first_sample + count)
        weights = np.where(samples < n, 1, int(part == "train"))
        places = order_of_training(n, self.seed, first_sample, count) if part == "train" else samples % n
        chosen = [self.parts[part][place] for place in places]
        rows = [sequence(first, sample.second, self.seq_length, self.tokenizer)
                for sample in chosen for first in sample.firsts]
        tokens, token_types, lengths = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        answers = np.array([sample.answer for sample in chosen], np.int64)
        return self.batch_type(tokens, token_types, lengths, answers, weights).pack()

    def measures(self, part: str, probabilities: np.ndarray) -> dict[str, float]:
        """Return the figures of a part by name, the most important one first, from probabilities [samples, n].

        An answer is right if it has the highest probability.
        """
        right = probabilities.argmax(1) == [sample.answer for sample in self.parts[part]]
        levels, ends = self.levels[part], np.cumsum([len(level) for level in self.levels[part].values()])
        found = {f"{name} accuracy": each.mean() for name, each in zip(levels, np.split(right, ends), strict=False)}
        return {"accuracy": right.mean()} | (found if len(levels) > 1 else {})


def sequence(first: "array[int]", second: "array[int]", seq_length: int,
             tokenizer: WordPieceTokenizer) -> tuple[list[int], list[int], int]:
    """Return `[CLS] first [SEP] second [SEP]`, with the second cut at its end if need be, and padded: tokens [s];
    types [s], 1 from the second on; the length.
    """
    head = [tokenizer.cls, *first, tokenizer.sep]
    tail = [*second[:seq_length - len(head) - 1], tokenizer.sep]
    length = len(head) + len(tail)
    rest = seq_length - length
    return [*head, *tail, *[tokenizer.pad] * rest], [0] * len(head) + [1] * len(tail) + [0] * rest, length
