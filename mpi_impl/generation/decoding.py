"""Token generation by a GPT on ranks. Its textbook twin is `generate` of reference/generation/decoding.py.

A new token goes through the pipeline alone: each rank adds its keys and values to the KV cache of its own layers and
heads (reference/kv_cache.py). The last stage's ranks gather the logits of the whole vocabulary, the first of them
draws, and broadcasts the token to all.
"""
from collections.abc import Iterator, Sequence

import numpy as np

from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.generation.replica import Replica
from mpi_impl.models.gpt import next_logits
from mpi_impl.runtime.arrays import moved_to, to_host
from reference.errors import UserError
from reference.generation.decoding import Sampling, continuation, positions_for
from reference.kv_cache import KVCache
from reference.models.stage import has_embedding, has_head
from reference.schedules.actions import Action

NONE = -1      # in place of a token: the logits are not finite


def generate(replica: Replica, prompt: Sequence[int], count: int, sampling: Sampling, text: int = 0) -> Iterator[int]:
    """Yield the `count` tokens that follow the prompt, each as soon as it is known; identical on every rank."""
    kv_cache = replica.empty_kv_cache(positions_for(prompt, count, replica.model))

    def follow(tokens: list[int], position: int) -> int:
        with replica.topology.world.ledger.phase("sampling"):
            return next_token(replica, tokens, kv_cache, sampling, position, text)

    yield from continuation(prompt, count, replica.model.max_position_embeddings, kv_cache, follow)


def next_token(replica: Replica, tokens: list[int], kv_cache: dict[int, KVCache], sampling: Sampling, position: int,
               text: int) -> int:
    """Return the token at this position, identical on every rank. Raise UserError, on every rank, for infinite logits
    or NaN.
    """
    logits, token = last_logits(replica, tokens, kv_cache), np.zeros(1, np.int64)
    topology = replica.topology
    if logits is not None and topology.place.tensor == 0:
        token[0] = sampling.choose(logits, position, text) if np.isfinite(logits).all() else NONE
    drawn = int(topology.model.broadcast(token, "sampled token", replica.last_rank * topology.tensor.size)[0])
    if drawn == NONE:
        raise UserError(f"The logits of the token at position {position} are infinite or NaN: the model has diverged, "
                        "or needs a format with a larger range than its --dtype.")
    return drawn


def last_logits(replica: Replica, tokens: list[int], kv_cache: dict[int, KVCache]):
    """Return the logits [V] of the next token, on the host of the last stage's ranks; None on the others.

    The tokens follow those that `kv_cache` has seen, and are added to it.
    """
    found, model = [], replica.model
    region = TensorParallelRegion(replica.topology.tensor, replica.topology.expert)     # positions are not sharded
    ids = moved_to(np.array([tokens]), replica.device_prototype)

    def forward(action: Action, x):
        params = replica.params[action.stage]
        own = {layer: kv_cache[layer] for layer in params.blocks}
        y = next_logits(ids if has_embedding(params) else x, params, model, own, region)
        if not has_head(params, model):
            return y
        found.append(to_host(region.gather(y, "logits of the last position")[0])[:model.vocab_size])    # no padding
        return None

    replica.pipeline.play({"F": forward}, replica.device_prototype, (1, len(tokens), model.hidden_size),
                          phases={"F": "sampling"})
    return found[0] if found else None
