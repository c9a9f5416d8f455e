"""Text from the model that was just trained, token by token, on all ranks of one replica."""
import numpy as np

from mpi_impl.arrays import moved_to, to_host
from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.models.gpt import gpt_logits
from mpi_impl.training.trainer import Trainer
from reference import counter_rng
from reference.actions import Action
from reference.models.gpt import has_embedding, has_head
from reference.ops import softmax

TEMPERATURE = 0.8     # below 1, likely words become likelier: a small model rambles less


def sample(trainer: Trainer, first_token: int, count: int, seed: int) -> list[int]:
    """`count` tokens that follow first_token, alike on all ranks of a replica, which call this together.

    Every token is computed from the last tokens that fit the model, all of them again: simple, and fast enough here.
    """
    key = counter_rng.key(seed, "sampling")
    tokens = [first_token]
    with trainer.ledger.phase("sampling"):
        for i in range(count):
            context = np.array([tokens[-trainer.model.max_position_embeddings:]])
            logits = last_logits(trainer, moved_to(context, trainer.near))        # [V], on the last stage's ranks
            token = np.zeros(1, np.int64)
            if logits is not None:
                cumulative = np.cumsum(softmax(to_host(logits).astype(np.float64) / TEMPERATURE))
                draw = counter_rng.uniform(key, np.array([i], np.uint64))
                token[0] = np.searchsorted(cumulative, draw[0] * cumulative[-1])
            tokens.append(int(trainer.topology.pipeline.broadcast(token, "sampled token", trainer.last_rank)[0]))
    return tokens[1:]


def last_logits(trainer: Trainer, context):
    """Tokens [1, s] -> logits [V] after the last of them, on the last stage's ranks; None on the others."""
    found, region = [], TensorParallelRegion(trainer.topology.tensor)     # any number of positions: they are not cut

    def forward(action: Action, x):
        params = trainer.stage_params[action.stage]
        y = gpt_logits(context if has_embedding(params) else x, params, trainer.model, region)
        if not has_head(params, trainer.model):
            return y
        found.append(region.group.all_gather(y[:, -1], -1, "logits of the last position")[0])   # padding: -inf
        return None

    trainer.pipeline("evaluation", 1).play({"F": forward}, trainer.near,
                                           (*context.shape, trainer.model.hidden_size), phases={"F": "sampling"})
    return found[0] if found else None
