"""Random exact numbers: the weights with which a proof begins, and the samples of its steps."""
import numpy as np

from mpi_impl.parallel.model_state import ModelState
from reference.batches import BERTBatch
from reference.config import ModelConfig
from reference.exact.array import random_array
from reference.models.model import model_tensors
from reference.params import assign, leaves, shard, tree_map, with_names
from reference.training import trainer as training


def random_parameters(model: ModelConfig, seed: int):
    """Draw the whole model's parameters."""
    return tree_map(lambda named: random_array(named.leaf.shape, seed, named.name), with_names(model_tensors(model)))


def start_textbook(textbook: training.Trainer, whole) -> None:
    """Give the textbook these parameters, and moments of their kind."""
    textbook.params = tree_map(np.copy, whole)
    textbook.m, textbook.v = tree_map(np.zeros_like, whole), tree_map(np.zeros_like, whole)


def start_ranks(state: ModelState, whole) -> None:
    """Give a rank its shards of these parameters. The initial ones are few numbers, often 0 or 1."""
    tensor, values = state.topology.tensor, dict(leaves(whole))
    flat = np.zeros_like(state.device_prototype, shape=state.layout.size)
    tree_map(lambda view, named: assign(view, shard(values[named.name], named.leaf, tensor.size, tensor.rank)),
             state.layout.views(flat), with_names(state.layout.tensors))
    for piece in state.pieces:
        state.parameters.own.store(piece, flat[piece.in_buffer])
    state.zero.finish_update()


class RandomSamples:
    """A data set of random samples: sample i is the same for everybody who asks for it."""

    def __init__(self, model: ModelConfig, seq_length: int, seed: int):
        self.model, self.s, self.seed = model, seq_length, seed

    def batch(self, part: str, first: int, count: int) -> np.ndarray:
        """Return rows of the data set (reference/batches.py)."""
        return np.concatenate([self.row(np.random.default_rng([self.seed, i])) for i in range(first, first + count)])

    def row(self, rng) -> np.ndarray:
        """Draw a sample, int64 [1, width]. A BERT's may be padded, and predicts one token at least."""
        tokens = rng.integers(0, self.model.vocab_size, (2, 1, self.s))
        if self.model.causal:
            return np.concatenate([tokens[0], tokens[1, :, :1]], 1)
        types, weights = rng.integers(0, 2, (2, 1, self.s))
        weights[:, 0] = 1
        return BERTBatch(tokens[0], types, tokens[1], weights, rng.integers(1, self.s + 1, 1),
                         rng.integers(0, 2, 1)).pack()
