"""Training data of the experiments, as batches for a GPT or a BERT: windows of bytes from the source of Python's own
library, sequences of numbers with equal steps, and walks through tables.
"""
from typing import NamedTuple

import numpy as np

from mpi_impl.data.corpus import Corpus
from reference.batches import BERTBatch, GPTBatch

BYTES = 256                             # the vocabulary, without the mask
MASK, MASKED = BYTES, 0.15              # BERT's token, and its share
TRAINED = 0.95                          # the share of the text to learn from; the files behind it are for validation


class Text(NamedTuple):
    """The two parts of a text, uint8."""

    training: np.ndarray
    validation: np.ndarray


def read_text() -> Text:
    everything = np.frombuffer("".join(Corpus(None).documents()).encode(), np.uint8)
    return Text(*np.split(everything, [int(TRAINED * len(everything))]))


def windows(part: np.ndarray, rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    """Return windows that begin anywhere, int64 [count, length]."""
    first = rng.integers(len(part) - length + 1, size=(count, 1))
    return part[first + np.arange(length)].astype(np.int64)


def equal_steps(rng: np.random.Generator, numbers: int, samples: int, length: int) -> np.ndarray:
    """Make sequences n, n + k, n + 2k, ..., modulo the numbers that there are, int64 [samples, length]."""
    first, step = rng.integers(numbers, size=(samples, 1)), rng.integers(1, 4, size=(samples, 1))
    return (first + step * np.arange(length)) % numbers


def walks(rng: np.random.Generator, numbers: int, samples: int, steps: int) -> BERTBatch:
    """Make a table for each sample, a permutation of the numbers; a number; and what follows it in the table, step by
    step. All that follows must be predicted, and is masked by the number after the last.
    """
    table, path = np.argsort(rng.random((samples, numbers)), 1), [rng.integers(numbers, size=(samples, 1))]
    for _ in range(steps):
        path.append(np.take_along_axis(table, path[-1], 1))
    tokens = np.concatenate([table, *path], 1)
    masked = np.arange(numbers + 1 + steps) > np.full((samples, 1), numbers)
    return without_order(fill_in(tokens, masked, numbers))


def gpt_batch(part: np.ndarray, rng: np.random.Generator, samples: int, s: int) -> GPTBatch:
    return GPTBatch.unpack(windows(part, rng, samples, s + 1))


def bert_batch(part: np.ndarray, rng: np.random.Generator, samples: int, s: int) -> BERTBatch:
    return without_order(masked_batch(windows(part, rng, samples, s), rng, MASK))


def masked_batch(tokens: np.ndarray, rng: np.random.Generator, mask: int) -> BERTBatch:
    """Mask some tokens [samples, s], at least one of each sample."""
    masked = np.less(rng.random(tokens.shape), MASKED)
    masked[:, 0] |= ~masked.any(1)
    return fill_in(tokens, masked, mask)


def fill_in(tokens: np.ndarray, masked: np.ndarray, mask: int) -> BERTBatch:
    """Return the task to predict the masked ones of the tokens [samples, s]."""
    samples, s = tokens.shape
    return BERTBatch(np.where(masked, mask, tokens), np.zeros_like(tokens), np.where(masked, tokens, 0),
                     masked.astype(np.int64), np.full(samples, s), np.zeros(samples, np.int64))


def without_order(batch: BERTBatch) -> BERTBatch:
    """Give no weight to the order of two pieces, for which nothing asks."""
    return batch._replace(counted=np.zeros(len(batch.tokens), np.int64))
