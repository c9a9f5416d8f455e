"""One transformer block, which walkthroughs shard in several ways: its sizes, and its run, whole and on ranks."""
import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.config import ModelConfig
from reference.layer_context import LayerContext
from reference.layers import block as textbook
from reference.params import initialize, initialize_shard, leaves, tree_map
from reference.random.dropout import Dropout

T, B, S = 4, 2, 16      # ranks; a microbatch of B texts, S positions (tokens) each
CONFIG = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=8, vocab_size=1, max_position_embeddings=S,
                     init_method_std=0.2, hidden_dropout=0.2, attention_dropout=0.2)
TENSORS = textbook.block_tensors(CONFIG)
DROPOUT = Dropout(CONFIG, seed=1, step=0, layer=0)


def inputs():
    """Return a random x, and a random gradient from above, dy: [b, s, h] each."""
    return np.random.default_rng(5).normal(size=(2, B, S, CONFIG.hidden_size))


def in_one_process(x, dy):
    """Return y, dx [b, s, h] and the gradients of all weights, as the textbook computes them."""
    whole = initialize(TENSORS, seed=1, dtype=np.float64)
    y, cache = textbook.block_forward(x, whole, CONFIG, LayerContext(DROPOUT))
    return y, *textbook.block_backward(dy, whole, cache, CONFIG)


def shard(group: Group):
    """Return this rank's weights, which are drawn without the whole."""
    return initialize_shard(TENSORS, seed=1, dtype=np.float64, t=group.size, rank=group.rank,
                            like=group.instruments.like)


def through(region: TensorParallelRegion, p, x, dy, dropout=DROPOUT):
    """Run forward and backward of this rank's shard p. Return y, the cache, dx, and the gradients of p."""
    with region.group.ledger.phase("forward"):
        y, cache = block_forward(x, p, CONFIG, region, LayerContext(dropout))
    grads = tree_map(np.zeros_like, p)
    with region.group.ledger.phase("backward"):
        dx = block_backward(dy, p, cache, CONFIG, grads, ImmediateSink(), region)
    return y, cache, dx, grads


def off(found, expected):
    """Return the largest difference in any tensor, relative to the tensor's largest element."""
    return max(np.abs(a - b).max() / np.abs(b).max() for (_, a), (_, b) in zip(leaves(found), leaves(expected)))
