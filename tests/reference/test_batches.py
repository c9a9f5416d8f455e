"""Batches: a row has all of a sample, and every sample is dealt out once."""
import numpy as np
from hypothesis import given, strategies as st

from reference.models.model import batch_type
from reference.parallel.data_parallel import samples_of
from tests.strategies import cases

COUNT = st.integers(1, 3)


@given(cases(sizes=st.just(1), architectures=("bert",)))
def test_a_sample_is_a_row(case):
    """A batch packs into rows of integers, each of the declared width, and each row unpacks to its own sample."""
    kind, batch = batch_type(case.model), case.batch("", case.b)
    rows = batch.pack()
    assert rows.shape == (case.b, kind.width(case.s)) and rows.dtype == np.int64
    one_by_one = zip(*(kind.unpack(row[None]) for row in rows))
    for unpacked in (kind.unpack(rows), kind(*(None if x[0] is None else np.concatenate(x) for x in one_by_one))):
        for one, other in zip(unpacked, batch, strict=True):
            np.testing.assert_array_equal(one, other)


@given(COUNT, COUNT, COUNT)
def test_every_sample_is_dealt_once(d, m, b):
    """Replica by replica, microbatch by microbatch, in Megatron's order: neighbours in the batch go to neighbours."""
    batch = np.arange(d * m * b)
    dealt = [batch[samples_of(r, k, d, b)].tolist() for k in range(m) for r in range(d)]
    assert sum(dealt, []) == batch.tolist() and all(len(samples) == b for samples in dealt)
