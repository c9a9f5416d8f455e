"""Texts from a model on ranks, and from the textbook, which tests of generation share."""
import numpy as np

from mpi_impl.checkpoints.huggingface import within_segment
from mpi_impl.inference.decoding import generate, last_logits
from mpi_impl.inference.replica import Replica, load_replica
from reference.config import ParallelConfig
from reference.generation import decoding as textbook
from reference.generation.decoding import Sampling
from reference.models.gpt import gpt_logits, gpt_tensors
from reference.params import leaves, shard
from tests.cases import Case, close
from tests.rank_theorems import as_is, host
from tests.training_theorems import connected


def text_of(case: Case, prompt: list[int], count: int, sampling: Sampling, number: int = 0) -> list[int]:
    """Return the textbook's text of this number."""
    params = case.params(gpt_tensors(case.model))
    return textbook.generate([prompt], count, params, case.model, sampling, number)[0]


def replica_of(topology, case: Case, like, change=as_is) -> Replica:
    """Load a rank's shard of the case's model; `change` is applied to each tensor first."""
    params, place = dict(leaves(case.params(gpt_tensors(case.model)))), topology.place

    def read(piece):
        segment = piece.of
        part = shard(params[segment.name], segment.tensor, topology.tensor.size, place.tensor)
        return change(part.reshape(-1)[within_segment(piece)])

    return load_replica(case.model, topology, like, read)


def on_ranks(group, p: int, case: Case, dtype, act, *args, wrap=as_is):
    """Call `act(replica, *args)` on case.t x p ranks."""
    with connected(group, ParallelConfig.for_world(group.size, case.t, p)) as topology:
        return act(replica_of(topology, case, wrap(np.empty(0, dtype))), *args)


def texts(replica: Replica, prompts: list[list[int]], count: int, sampling: Sampling, first_text: int = 0):
    """Return the texts of a batch as lists of tokens, and how many positions were computed."""
    found = list(generate(replica, prompts, count, sampling, first_text))
    return [[token for token in text if token is not None] for text in zip(*found)], len(found)


def logits_equal_uncached(replica: Replica, case: Case, pieces: list[int], tolerance: float):
    """Show the tokens to the model in pieces: after each, the logits equal those of the whole prefix shown in one go.

    The cache holds no more than the keys and values of this rank's heads and layers, for as many positions.
    """
    c, t, s = case.model, replica.topology.tensor.size, sum(pieces)
    words = case.ids("words", s)
    kv_cache = replica.empty_kv_cache(s)
    kept = sum(one.k.size + one.v.size for one in kv_cache.values())
    each = 2 * s * max(1, c.groups // t) * c.head_size
    assert kept == each * sum(len(params.blocks) for params in replica.params.values())
    expected = gpt_logits(words[None], case.params(gpt_tensors(c)), c)[0]       # [s, V]
    for size, end in zip(pieces, np.cumsum(pieces)):
        logits = last_logits(replica, [words[end - size:end].tolist()], kv_cache)
        assert {one.length for one in kv_cache.values()} == {end}
        assert (logits is None) == (replica.topology.place.pipeline != replica.last_rank)
        if logits is not None:
            close(host(logits)[0].astype(np.float64), expected[end - 1], tolerance)
