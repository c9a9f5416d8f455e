"""Each replica reads its own samples, its tensor ranks get the same ones, and together they have the global batch."""
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.training.batches import Batches, whole_batch
from reference.config import ParallelConfig
from reference.data_parallel import samples_of

COUNT = st.integers(1, 3)


class Numbers:
    """A data set whose sample i is i, i + 1, ..., i + s."""

    def __init__(self, s):
        self.s = s

    def batch(self, part, first, count):
        assert part == "train"
        return np.arange(first, first + count)[:, None] + np.arange(self.s + 1)


@given(st.data(), COUNT, COUNT, COUNT, st.integers(0, 5))
def test_a_batch_is_dealt_out(ranks, data, b, m, s, step):
    t = data.draw(st.integers(1, 8), "t")
    d = data.draw(st.integers(1, 8 // t), "d")
    tokens, targets = whole_batch(Numbers(s), "train", step, m * d * b)
    assert tokens[:, 0].tolist() == list(range(step * m * d * b, (step + 1) * m * d * b))
    assert (targets == tokens + 1).all()
    for rank, dealt in enumerate(ranks.run(t * d, microbatches, t, b, m, s, step)):
        for k, (x, y) in enumerate(dealt):
            mine = samples_of(rank // t, k, d, b)
            assert (x == tokens[mine]).all() and (y == targets[mine]).all()


def microbatches(group, t, b, m, s, step):
    """Only tensor rank 0 has data; the others must be given it."""
    topology = connect(group, ParallelConfig.for_world(group.size, t))
    dataset = Numbers(s) if topology.place.tensor == 0 else None
    dealt = list(Batches(dataset, topology, s, b, m).microbatches_of("train", step))
    disconnect(topology)
    return dealt
