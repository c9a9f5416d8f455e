"""Arrays without data have the shapes, formats and layouts of NumPy's, and take the memory that those would."""
import gc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

from mpi_impl.prediction.meta import MetaArray, prototype
from mpi_impl.prediction.meta_device import MetaDevice

DTYPES = st.sampled_from([np.dtype(name) for name in ("float64", "float32", "float16", "int64", "uint32", "bool")]
                         + [np.dtype(ml_dtypes.bfloat16)])


def both(shape, dtype) -> tuple[np.ndarray, MetaArray]:
    """Return an array of ones, and one without data."""
    return np.ones(shape, dtype), np.zeros_like(prototype(MetaDevice()), shape=shape, dtype=dtype)


def same(x: np.ndarray, y: MetaArray) -> None:
    assert (x.shape, x.dtype, x.nbytes) == (y.shape, y.dtype, y.nbytes)
    assert x.flags.c_contiguous == y.flags.c_contiguous


@given(st.data(), array_shapes(max_dims=3), DTYPES)
def test_views(data, shape, dtype):
    """Slices, other axes, other shapes: each is a view where NumPy's is one, and else a copy."""
    x, y = both(shape, dtype)
    index = data.draw(basic_indices(shape, allow_newaxis=True))
    same(np.asarray(x[index]), y[index])
    same(x.T, y.T)
    x, y = x.T, y.T
    flat, its = x.reshape(-1), y.reshape(-1)
    same(flat, its)
    assert np.shares_memory(flat, x) == np.may_share_memory(its, y) or x.size < 2


def test_memory_is_counted_while_it_lives():
    """A view keeps the whole array; the peak has the lines that made what lived."""
    device = MetaDevice()
    x = np.zeros_like(prototype(device), shape=(100, 10), dtype=np.float32)
    row = x[3]
    y = x + 1
    assert device.live == 8000
    del x, y
    gc.collect()
    assert device.live == 4000 and device.most().size == 8000
    del row
    assert device.live == 0
    peak = device.most()
    assert sum(peak.sites.values()) == peak.size == 8000
    assert {site.line.partition(":")[0] for site in peak.sites} == {"tests/mpi_impl/test_meta.py"}


def test_what_depends_on_data_is_refused():
    """A mask's count and a truth are not known; a count of ids is taken for even."""
    _, x = both((2, 5), np.int64)
    with pytest.raises(TypeError, match="depends on data"):
        x[x > 0]
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(x.sum())
    with pytest.raises(TypeError):
        np.linalg.svd(x)
    assert np.diff(np.searchsorted(x.reshape(-1), np.arange(5, like=x))).get().tolist() == [3, 3, 2, 2]
    assert x.sum().item() == 0 and x.get().shape == (2, 5)
