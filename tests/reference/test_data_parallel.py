"""Dealing a batch out to replicas and microbatches changes neither the loss nor the gradient."""
import numpy as np
from hypothesis import given, strategies as st

from reference.parallel.data_parallel import samples_of
from tests.strategies import cases
from tests.textbook_theorems import replicas_equal_one_process

COUNT = st.integers(1, 3)


@given(COUNT, COUNT, COUNT)
def test_every_sample_is_dealt_once(d, m, b):
    """Replica by replica, microbatch by microbatch, in Megatron's order: neighbours in the batch go to neighbours."""
    batch = np.arange(d * m * b)
    dealt = [batch[samples_of(r, k, d, b)].tolist() for k in range(m) for r in range(d)]
    assert sum(dealt, []) == batch.tolist() and all(len(samples) == b for samples in dealt)


@given(cases(sizes=st.just(1)), COUNT, COUNT)
def test_replicas_together_are_one_process(case, d, m):
    replicas_equal_one_process(case, d, m)
