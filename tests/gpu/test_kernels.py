"""Every CUDA kernel is its textbook twin, on a GPU, or by the sources that a GPU gets on a CPU (emulated.py).

In float64 and float32 to rounding; in formats of two bytes within a few roundings of what the textbook makes of the
same halves in float64. Widths fit the 16 bytes that a thread takes at a time, or do not.
"""
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl import kernels
from mpi_impl.kernels import fused
from mpi_impl.kernels.cuda import flash
from mpi_impl.kernels.cuda.gemm import multiply
from mpi_impl.runtime.arrays import dtype_of
from reference import ops
from tests.gpu import device, emulated
from tests.gpu.device import put
from tests.kernel_theorems import (ARGUMENTS, HALVES, TABLE, WIDE, Drawing, bits_around_a_carry, bound_of, far_out,
                                   in_float64, is_the_textbooks, laid_out, near, stays)

pytestmark = device.needs_somewhere
FUNCTIONS = SimpleNamespace(**TABLE)        # which find out by themselves that arrays are on a device
FORMS = st.sampled_from([*WIDE, *HALVES])


@pytest.fixture(autouse=True)
def gpu():
    with device.gpu():
        yield


def draw(data, form: str) -> Drawing:
    """Return the draws of one example, on the device."""
    return Drawing(data, form, FUNCTIONS, put, away=True, on_device=True)


def same(actual, expected, form, roundings=1.0):
    """Assert that an array is on the device, in this format, and near the textbook's."""
    assert not isinstance(actual, np.ndarray) and actual.dtype == dtype_of(form)
    near(actual.get(), expected, bound_of(form, roundings))


@pytest.mark.parametrize("name", ARGUMENTS)
@given(data=st.data(), form=FORMS)
def test_a_kernel_is_the_textbooks(name, data, form):
    is_the_textbooks(name, draw(data, form))


# ---- products -------------------------------------------------------------------------------------------------------


@given(st.data(), st.none() | st.integers(1, 3), *[st.integers(1, 9)] * 3, *[st.booleans()] * 2, FORMS)
def test_products(data, n, r, k, c, apart, add, form):
    """However the factors lie; to what is there, or over it; halves in their format or in float32."""
    d, batch = draw(data, form), [] if n is None else [n]
    x, y = d.lying(*batch, r, k), d.lying(*batch, k, c)
    for out_form in {form, stays(form)}:
        out = d.host(*batch, r, c, form=out_form)
        expected = np.matmul(in_float64(x), in_float64(y)) + (in_float64(out) if add else 0)
        place = laid_out(out, "apart" if apart else "rows", put)
        assert multiply(x, y, place, add=add) is place
        same(place, expected, out_form, 2)


def test_what_a_product_does_not_write():
    """Between rows that are apart."""
    wider = put(np.full((3, 9), 7.0))
    multiply(put(np.ones((3, 2))), put(np.ones((2, 4))), wider[:, 2:6])
    assert (wider.get() == [[7, 7, 2, 2, 2, 2, 7, 7, 7]] * 3).all()


# ---- arguments that are rarely drawn --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*WIDE, "bfloat16"])
def test_far_out(form):
    """Kernels are right for inputs so large that exp overflows."""
    far_out(FUNCTIONS, form, put)


@given(st.data(), st.integers(1, 3), FORMS)
def test_heads_that_lie_together_are_not_copied(data, parts, form):
    """On a real GPU, whose views know their base."""
    together = draw(data, form).array(2, 4, parts, 3, 5)
    for order in (1, -1):
        views = [together[:, :, i] for i in range(parts)][::order]
        stacked = kernels.stack(views)
        np.testing.assert_array_equal(stacked.get(), together.get()[:, :, ::order])
        assert (getattr(views[0], "base", None) is stacked) == (device.REAL and (order > 0 or parts == 1))


@pytest.mark.parametrize("threads", [(64, 1), (32, 2), (8, 8)])
@pytest.mark.parametrize("name", ["layer_norm_backward", "rms_norm_backward"])
@settings(max_examples=2)
@given(data=st.data())
def test_norms_of_more_rows_than_blocks(monkeypatch, name, threads, data):
    """Blocks take several rows, one after another or together; a thread one pack of columns, or several, which it does
    not hold.
    """
    monkeypatch.setattr(fused, "BLOCKS", 3)
    monkeypatch.setattr(fused, "threads_for", lambda *_: threads)
    d = draw(data, "float64")
    d.rows, d.width = lambda: (1, 11), lambda least: 122
    is_the_textbooks(name, d)


@settings(max_examples=2)
@given(data=st.data())
def test_a_gradient_of_a_bias_of_more_rows_than_groups(monkeypatch, data):
    """Two blocks have a row together; three groups of them take several rows, one after another."""
    monkeypatch.setattr(fused, "BLOCKS", 6)
    d = draw(data, "float64")
    d.rows, d.size = lambda: (1, 11), lambda *_, **__: 150
    is_the_textbooks("activation_backward", d)


def test_bits_over_a_limit_of_32():
    bits_around_a_carry(FUNCTIONS, put)


# ---- what is called, and what is kept -------------------------------------------------------------------------------


@pytest.mark.skipif(device.REAL, reason="counts the emulation's calls")
def test_a_block_is_a_few_calls_of_cublas():
    """Whatever the numbers of samples and heads: on a GPU, to launch a product for each takes longer than to compute
    them.
    """
    q, k, along = (put(np.ones(shape, dtype_of(form))) for shape, form in (
        ((4, 5, 6, 8), "bfloat16"), ((4, 5, 3, 8), "bfloat16"), ((4, 6, 5, 1), "float32")))
    before = emulated.FakeCublas.calls
    kernels.block_attention(q, k, k, True)
    assert emulated.FakeCublas.calls == before + 2
    kernels.block_attention_backward(q, along, along, along, q, k, k, True)
    assert emulated.FakeCublas.calls == before + 7


def test_of_halves_no_probabilities_are_kept(monkeypatch):
    """And the core that is made again is what was kept."""
    monkeypatch.setattr(flash, "is_available", lambda: False)
    for form in ("float32", "bfloat16"):
        q = put(np.ones((2, 3, 4, 8), dtype_of(form)))
        inputs = ops.CoreInputs(q, q, q, True, None)
        _, cache = kernels.attention_core(*inputs)
        assert isinstance(cache, ops.CoreInputs) == (form == "bfloat16")
        assert type(kernels.attention_core_again(inputs)) is type(cache)
