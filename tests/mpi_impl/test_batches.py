"""Each replica reads its own samples, its tensor ranks get the same ones, and together they have the global batch."""
from unittest import mock

from hypothesis import given, settings, strategies as st

from mpi_impl.training.batches import Batches, whole_batch
from reference.config import ParallelConfig
from tests.training_theorems import ONE_LAYER as MODEL, Numbers, batch_is_dealt_out, connected

COUNT = st.integers(1, 3)


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
    ranks.run(t * p * d, batch_is_dealt_out, t, p, b, m, s, step)


def test_ranks_in_the_middle_read_nothing(ranks):
    """Not even where there is a data set."""
    assert ranks.run(4, reads_of_ranks) == [3, 0, 0, 3]


def reads_of_ranks(group):
    with connected(group, ParallelConfig(1, 4)) as topology:
        dataset = Numbers(5)
        with mock.patch.object(dataset, "batch", wraps=dataset.batch) as batch:
            Batches(dataset, MODEL, topology, 5, 2, 3).microbatches_of("train", 0)
        return batch.call_count
