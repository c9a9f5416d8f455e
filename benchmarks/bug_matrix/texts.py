"""Samples of real text for a tiny GPT or BERT: the source of a module of the standard library, a token a character."""
import argparse
import inspect
from collections import Counter
from functools import cache

import numpy as np

from reference.batches import CHOICES, BERTBatch, ChoiceBatch
from reference.config import ModelConfig

CLS, SEP, MASK, FIRST = 1, 2, 3, 4      # special tokens, after padding, which is 0; and the first character's
VOCAB_SIZE = 61                         # no multiple of 3: with 2 ranks tables end in padding
VALIDATION = 1 << 20                    # the number of the first sample of validation data
STRIDE = 9973                           # between the beginnings of two samples


@cache
def characters() -> np.ndarray:
    """Return the text's tokens, int64 [n]. All rare characters share the last one."""
    text = inspect.getsource(argparse)
    frequent = [character for character, _ in Counter(text).most_common(VOCAB_SIZE - FIRST - 1)]
    number = {character: FIRST + i for i, character in enumerate(sorted(frequent))}
    return np.array([number.get(character, VOCAB_SIZE - 1) for character in text])


class CharacterSamples:
    """A data set of samples of s tokens for any model. Sample i is a function of i."""

    def __init__(self, model: ModelConfig, s: int):
        self.model, self.s = model, s

    def batch(self, part: str, first: int, count: int) -> np.ndarray:
        """Return samples as rows (reference/batches.py)."""
        numbers = range(first, first + count) if part == "train" else range(VALIDATION + first,
                                                                            VALIDATION + first + count)
        if self.model.causal:
            return np.stack([self.text(i * STRIDE, self.s + 1) for i in numbers])
        make = self.choice if self.model.heads == ("choice",) else self.pair
        return np.concatenate([make(np.random.default_rng(i), i).pack() for i in numbers])

    def text(self, start: int, length: int) -> np.ndarray:
        """Return a piece of the text, which starts again at its end."""
        return np.take(characters(), range(start, start + length), mode="wrap")

    def pair(self, rng, i: int) -> BERTBatch:
        """Return two adjacent pieces of text, maybe swapped, with a sixth of their tokens masked."""
        length, swapped = int(rng.integers(self.s // 2, self.s + 1)), int(rng.integers(2))
        pieces = np.split(self.text(i * STRIDE, length - 3), [int(rng.integers(1, length - 3))])
        tokens, types = self.joined(*(pieces[::-1] if swapped else pieces))
        masked = (rng.random(self.s) < 1 / 6) & (tokens >= FIRST)
        masked[1] = True
        return BERTBatch(*(x[None] for x in (np.where(masked, MASK, tokens), types, np.where(masked, tokens, 0),
                                             masked.astype(np.int64))), np.array([length]), np.array([swapped]))

    def choice(self, rng, i: int) -> ChoiceBatch:
        """Return a piece of text with four continuations, one of which is the text's."""
        n, answer = self.s // 2 - 2, int(rng.integers(CHOICES))
        starts = [i * STRIDE + n if k == answer else int(rng.integers(len(characters()))) for k in range(CHOICES)]
        rows = [self.joined(self.text(i * STRIDE, n), self.text(start, n)) for start in starts]
        tokens, types = (np.stack(x) for x in zip(*rows))
        return ChoiceBatch(tokens, types, np.full(CHOICES, 2 * n + 3), np.array([answer]), np.array([1]))

    def joined(self, a, b) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and types of [CLS] A [SEP] B [SEP], padded."""
        tokens, types = np.zeros(self.s, np.int64), np.zeros(self.s, np.int64)
        tokens[:len(a) + len(b) + 3] = [CLS, *a, SEP, *b, SEP]
        types[len(a) + 2:len(a) + len(b) + 3] = 1
        return tokens, types
