"""Token generation by a GPT on ranks. Its textbook twin is `generate` of reference/generation/decoding.py.

The new tokens of a batch go through the pipeline alone: each rank adds their keys and values to the KV cache of its own
layers and heads (reference/kv_cache.py). The last stage's ranks gather the logits of the whole vocabulary, the first of
them draws, and broadcasts the tokens to all.
"""
from collections.abc import Iterator, Sequence

import numpy as np

from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.inference.replica import Replica
from mpi_impl.models.gpt import next_logits
from mpi_impl.runtime.arrays import moved_to, to_host
from reference.errors import UserError
from reference.generation.decoding import Sampling, continuation, positions_for
from reference.kv_cache import KVCache
from reference.models.stage import has_embedding, has_head
from reference.schedules.actions import Action

NONE = -1      # in place of a token: the logits are not finite


def generate(replica: Replica, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling,
             first_text: int = 0) -> Iterator[list[int | None]]:
    """Yield the tokens of all texts at each position, as soon as they are known; identical on every rank.

    None stands for a text whose prompt goes on, or that has its `count` tokens. Texts are numbered from `first_text`.
    """
    kv_cache = replica.empty_kv_cache(positions_for(prompts, count, replica.model), len(prompts))

    def follow(tokens: list[list[int]], position: int) -> list[int]:
        with replica.topology.world.ledger.phase("sampling"):
            return next_tokens(replica, tokens, kv_cache, sampling, position, first_text)

    yield from continuation(prompts, count, replica.model.max_position_embeddings, kv_cache, follow)


def next_tokens(replica: Replica, tokens: list[list[int]], kv_cache: dict[int, KVCache], sampling: Sampling,
                position: int, first_text: int) -> list[int]:
    """Return each text's token at this position, identical on every rank. Raise UserError, on every rank, for infinite
    logits or NaN.
    """
    logits, drawn = last_logits(replica, tokens, kv_cache), np.full(len(tokens), NONE)
    topology = replica.topology
    if logits is not None and topology.place.tensor == 0 and np.isfinite(logits).all():
        drawn[:] = sampling.choose_each(logits, position, first_text)
    found = topology.model.broadcast(drawn, "sampled tokens", replica.last_rank * topology.tensor.size).tolist()
    if NONE in found:
        raise UserError(f"The logits of the token at position {position} are infinite or NaN: the model has diverged, "
                        "or needs a format with a larger range than its --dtype.")
    return found


def last_logits(replica: Replica, tokens: list[list[int]], kv_cache: dict[int, KVCache]):
    """Return the logits [b, V] of each text's next token, on the host of the last stage's ranks; None on the others.

    The tokens [b, n] follow those that `kv_cache` has seen, and are added to it.
    """
    found, model = [], replica.model
    region = TensorParallelRegion(replica.topology.tensor, replica.topology.expert)     # positions are not sharded
    ids = moved_to(np.array(tokens), replica.device_prototype)

    def forward(action: Action, x):
        params = replica.params[action.stage]
        own = {layer: kv_cache[layer] for layer in params.blocks}
        y = next_logits(ids if has_embedding(params) else x, params, model, own, region)
        if not has_head(params, model):
            return y
        found.append(to_host(region.gather(y, "logits of the last position"))[:, :model.vocab_size])    # no padding
        return None

    replica.pipeline.play({"F": forward}, replica.device_prototype, (*ids.shape, model.hidden_size),
                          phases={"F": "sampling"})
    return found[0] if found else None
