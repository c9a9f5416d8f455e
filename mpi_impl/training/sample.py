"""Text from the model that was just trained, token by token, on all ranks of one replica."""
import numpy as np

from mpi_impl.models.gpt import gpt_logits
from mpi_impl.training.trainer import Trainer
from reference import counter_rng
from reference.ops import softmax

TEMPERATURE = 0.8     # below 1, likely words become likelier: a small model rambles less


def sample(trainer: Trainer, first_token: int, count: int, seed: int) -> list[int]:
    """`count` tokens that follow first_token, alike on all ranks of the tensor group, which call this together.

    Every token is computed from the last tokens that fit the model, all of them again: simple, and fast enough here.
    """
    tensor, key = trainer.topology.tensor, counter_rng.key(seed, "sampling")
    tokens = [first_token]
    with trainer.ledger.phase("sampling"):
        for i in range(count):
            context = np.array([tokens[-trainer.model.max_position_embeddings:]])
            logits = gpt_logits(context, trainer.params, trainer.model, trainer.region)[:, -1]     # [1, V/t]
            logits = tensor.all_gather(logits, -1, "logits of the last position")[0]               # padding: -inf
            cumulative = np.cumsum(softmax(logits.astype(np.float64) / TEMPERATURE))
            draw = counter_rng.uniform(key, np.array([i], np.uint64))
            tokens.append(int(np.searchsorted(cumulative, draw[0] * cumulative[-1])))
    return tokens[1:]
