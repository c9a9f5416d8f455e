"""Each replica reads its own samples, its tensor ranks get the same ones, and together they have the global batch."""
from unittest import mock

import numpy as np
from hypothesis import given, settings, strategies as st

from mpi_impl.comm.topology import place
from mpi_impl.training.batches import Batches, whole_batch
from reference.config import ModelConfig, ParallelConfig
from reference.parallel.data_parallel import samples_of
from tests.training_theorems import connected

COUNT = st.integers(1, 3)
MODEL = ModelConfig(1, 2, 1, 3, 8)


class Numbers:
    """A data set whose sample i is i, i + 1, ..., i + s."""

    def __init__(self, s):
        self.s = s

    def batch(self, part, first, count):
        assert part == "train"
        return np.arange(first, first + count)[:, None] + np.arange(self.s + 1)


@settings(max_examples=50)
@given(st.data(), COUNT, COUNT, COUNT, st.integers(0, 5))
def test_a_batch_is_dealt_out(ranks, data, b, m, s, step):
    """The first rank of a pipeline has the tokens, the last one the targets; those between only know the shape."""
    t = data.draw(st.integers(1, 8), "t")
    p = data.draw(st.integers(1, 8 // t), "p")
    d = data.draw(st.integers(1, 8 // (t * p)), "d")
    tokens, targets, _ = whole_batch(Numbers(s), MODEL, "train", step, m * d * b)
    assert tokens[:, 0].tolist() == list(range(step * m * d * b, (step + 1) * m * d * b))
    assert (targets == tokens + 1).all()
    found = ranks.run(t * p * d, microbatches, t, p, b, m, s, step)
    for rank, (microbatches_of_rank, calls) in enumerate(found):
        at = place(rank, ParallelConfig(t, p, d))
        assert calls == (m if at.pipeline in (0, p - 1) else 0) and len(microbatches_of_rank) == m
        for k, (x, y, _) in enumerate(microbatches_of_rank):
            mine = samples_of(at.data, k, d, b)
            assert x.shape == y.shape == (b, s)
            assert at.pipeline != 0 or (x == tokens[mine]).all()
            assert at.pipeline != p - 1 or (y == targets[mine]).all()


def microbatches(group, t, p, b, m, s, step):
    """Return this rank's microbatches and its messages. Only tensor rank 0 of a pipeline's ends has data: it must send
    them to the ranks that need them.
    """
    with connected(group, ParallelConfig.for_world(group.size, t, p)) as topology:
        has_data = topology.place.tensor == 0 and topology.place.pipeline in (0, p - 1)
        dealt = Batches(Numbers(s) if has_data else None, MODEL, topology, s, b, m).microbatches_of("train", step)
        return dealt, group.ledger.calls(reason="batch", phase="data")


def test_ranks_in_the_middle_read_nothing(ranks):
    """Not even where there is a data set."""
    assert ranks.run(4, reads_of_ranks) == [3, 0, 0, 3]


def reads_of_ranks(group):
    with connected(group, ParallelConfig(1, 4)) as topology:
        dataset = Numbers(5)
        with mock.patch.object(dataset, "batch", wraps=dataset.batch) as batch:
            Batches(dataset, MODEL, topology, 5, 2, 3).microbatches_of("train", 0)
        return batch.call_count
