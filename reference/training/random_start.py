"""The beginning of a proof: random exact weights (reference/exact/), and random samples."""
import numpy as np

from reference.batches import BERTBatch
from reference.exact.array import random_array
from reference.models.model import model_tensors
from reference.params import tree_map, with_names


def random_parameters(model, seed):
    """Draw a number for each of the whole model's parameters."""
    return tree_map(lambda named: random_array(named.leaf.shape, seed, named.name), with_names(model_tensors(model)))


def start_textbook(textbook, whole) -> None:
    """Add these numbers to a Trainer's initial parameters, and give it moments of their kind."""
    textbook.params = tree_map(np.add, textbook.params, whole)
    textbook.m, textbook.v = tree_map(np.zeros_like, whole), tree_map(np.zeros_like, whole)


class RandomSamples:
    """A data set of random samples: sample i is the same for everybody who asks for it."""

    def __init__(self, model, seq_length, seed):
        self.model, self.s, self.seed = model, seq_length, seed

    def batch(self, part, first, count):
        """Return rows of the data set (reference/batches.py)."""
        return np.concatenate([self.row(np.random.default_rng([self.seed, i])) for i in range(first, first + count)])

    def row(self, rng):
        """Draw a sample, int64 [1, width]. A BERT's may be padded, and predicts one token at least."""
        tokens = rng.integers(0, self.model.vocab_size, (2, 1, self.s))
        if self.model.causal:
            return np.concatenate([tokens[0], tokens[1, :, :1]], 1)
        types, weights = rng.integers(0, 2, (2, 1, self.s))
        weights[:, 0] = 1
        weights[np.cumsum(weights, 1) > self.model.most_predicted(self.s)] = 0
        return BERTBatch(tokens[0], types, tokens[1], weights, rng.integers(1, self.s + 1, 1),
                         rng.integers(0, 2, 1)).pack()
