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
    table, first = np.argsort(rng.random((samples, numbers)), 1), rng.integers(numbers, size=(samples, 1))
    found = [first]
    for _ in range(steps):
        found.append(np.take_along_axis(table, found[-1], 1))
    targets = np.concatenate([table, *found], 1)
    masked = np.arange(numbers + 1 + steps) > np.full_like(first, numbers)
    return BERTBatch(np.where(masked, numbers, targets), np.zeros_like(targets), np.where(masked, targets, 0),
                     masked.astype(np.int64), np.full(samples, targets.shape[1]), np.zeros(samples, np.int64),
                     np.zeros(samples, np.int64))


def gpt_batch(part: np.ndarray, rng: np.random.Generator, samples: int, s: int) -> GPTBatch:
    return GPTBatch.unpack(windows(part, rng, samples, s + 1))


def bert_batch(part: np.ndarray, rng: np.random.Generator, samples: int, s: int) -> BERTBatch:
    """Mask bytes. Nothing asks for the order of two pieces, so it has no weight."""
    return masked_batch(windows(part, rng, samples, s), rng, MASK)._replace(counted=np.zeros(samples, np.int64))


def masked_batch(tokens: np.ndarray, rng: np.random.Generator, mask: int) -> BERTBatch:
    """Mask some tokens [samples, s], at least one of each sample."""
    masked = np.less(rng.random(tokens.shape), MASKED)
    masked[:, 0] |= ~masked.any(1)
    samples, s = tokens.shape
    return BERTBatch(np.where(masked, mask, tokens), np.zeros_like(tokens), np.where(masked, tokens, 0),
                     masked.astype(np.int64), np.full(samples, s), np.zeros(samples, np.int64))
