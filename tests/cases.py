"""A case of the theorems: a model's sizes, a batch's, and a seed for the numbers in them; and what is equal.

Ranks import this, and so it does without hypothesis, which `tests/strategies.py` draws cases with.
"""
from dataclasses import dataclass

import numpy as np

from reference.config import ModelConfig
from reference.dropout import Dropout
from reference.mappings import TENSOR_PARALLEL, SequenceParallelRegion
from reference.params import leaves, tree_map, with_names


@dataclass(frozen=True)
class Case:
    """A model on t tensor-parallel ranks, and a batch. Numbers are a function of the seed."""

    t: int
    model: ModelConfig
    b: int
    s: int
    seed: int
    integers: bool = False   # whole numbers: their sums and products are exact, in any order
    sequence_parallel: bool = False
    keep_gathered_inputs: bool = False
    main = np.float64        # the dtype of gradients

    @property
    def region(self):
        """Of the textbook."""
        return SequenceParallelRegion(self.keep_gathered_inputs) if self.sequence_parallel else TENSOR_PARALLEL

    @property
    def dropout(self) -> Dropout:
        """Of a microbatch that is not the first, in some step and layer."""
        return Dropout(self.model, self.seed, step=3, sample=2, layer=1)

    def array(self, what: str, *shape):
        """float64, of order 1; an independent draw for each name."""
        rng = np.random.default_rng([self.seed, *what.encode()])
        return rng.integers(-4, 5, shape).astype(float) if self.integers else rng.normal(size=shape)

    def ids(self, what: str, *shape):
        """Words of the vocabulary: int64."""
        return np.random.default_rng([self.seed, *what.encode()]).integers(0, self.model.vocab_size, shape)

    def params(self, tensors):
        """A tree of whole tensors, all of them random, biases and norms too; h of them sum to O(1)."""
        scale = 1.0 if self.integers else 1 / np.sqrt(self.model.hidden_size)
        return tree_map(lambda named: scale * self.array(named.name, *named.leaf.shape), with_names(tensors))

    def x(self, what: str = "x"):
        """[b, s, h]."""
        return self.array(what, self.b, self.s, self.model.hidden_size)


def close(actual, expected, tolerance=1e-11):
    """Equal within the tolerance, relative to the largest expected element (or to 1, if that is larger)."""
    assert actual.shape == expected.shape, f"shape {actual.shape} is not {expected.shape}"
    difference = np.abs(actual - expected).max(initial=0)
    limit = tolerance * max(1.0, np.abs(expected).max(initial=0))
    assert difference <= limit, f"largest difference {difference:.1e}, allowed {limit:.1e}"


def trees_close(actual, expected, tolerance=1e-11):
    """The same tensors, each close; an error names the tensor."""
    for (name, x), (other, y) in zip(leaves(actual), leaves(expected), strict=True):
        assert name == other
        try:
            close(x, y, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
