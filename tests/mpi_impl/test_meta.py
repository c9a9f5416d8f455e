"""Arrays without data have the shapes, formats and layouts of NumPy's, and take the memory that those would."""
import gc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices, mutually_broadcastable_shapes

from mpi_impl.prediction.meta import MetaArray, prototype
from mpi_impl.prediction.meta_device import MetaDevice

DTYPES = st.sampled_from([np.dtype(name) for name in ("float64", "float32", "float16", "int64", "uint32", "bool")]
                         + [np.dtype(ml_dtypes.bfloat16)])
FLOATS = st.sampled_from([np.float64, np.float32, np.float16, ml_dtypes.bfloat16])


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


@given(mutually_broadcastable_shapes(num_shapes=2, max_dims=3), DTYPES, DTYPES,
       st.sampled_from([np.add, np.multiply, np.divide, np.maximum, np.less]))
def test_elementwise(shapes, dtype, other, ufunc):
    (x, y), (z, w) = both(shapes.input_shapes[0], dtype), both(shapes.input_shapes[1], other)
    w = np.zeros_like(y, shape=shapes.input_shapes[1], dtype=other)
    try:
        expected = ufunc(x, z)
    except TypeError:           # two formats that NumPy cannot promote
        with pytest.raises(TypeError):
            ufunc(y, w)
        return
    found = ufunc(y, w)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert (ufunc(y, 2).dtype, ufunc(y, 2.5).dtype) == (ufunc(x, 2).dtype, ufunc(x, 2.5).dtype)


@given(array_shapes(min_dims=1, max_dims=3), FLOATS, st.data())
def test_reductions(shape, dtype, data):
    x, y = both(shape, dtype)
    axis, keep = data.draw(st.sampled_from([None, 0, -1])), data.draw(st.booleans())
    for name in ("sum", "max", "mean"):
        expected = getattr(x, name)(axis=axis, keepdims=keep)
        found = getattr(y, name)(axis=axis, keepdims=keep)
        assert (found.shape, found.dtype) == (np.shape(expected), expected.dtype), name
    assert y.argmax(-1).shape == x.argmax(-1).shape


def test_products_and_joins():
    (x, y), (z, w) = both((3, 4), np.float32), both((4, 5), np.float32)
    w = np.zeros_like(y, shape=(4, 5))
    same(x @ z, y @ w)
    same(np.concatenate([x, x], 1), np.concatenate([y, y], 1))
    same(np.stack([x, x], -1), np.stack([y, y], -1))
    same(np.where(x > 0, x, 0), np.where(y > 0, y, 0))
    with pytest.raises(ValueError, match="4 columns are not 5 rows"):
        y @ w.T
    with pytest.raises(ValueError):
        y + w


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
