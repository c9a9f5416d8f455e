"""Batches: a row has all of a sample."""
import numpy as np
from hypothesis import given, strategies as st

from reference.models.model import batch_type
from tests.strategies import cases


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
