"""The table of kernels is complete, and every function of a core is its textbook twin, also off its tiles."""
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl import kernels
from mpi_impl.kernels import blockwise, compiled, compiled_halves, cpu, cuda, fused, half, partial_attention, plain
from mpi_impl.kernels.fused import core
from mpi_impl.runtime.arrays import dtype_of
from reference import ops
from reference.config import ACTIVATIONS
from reference.layers import online_softmax
from reference.random.dropout import Site
from tests.kernel_theorems import (ARGUMENTS, HALVES, TABLE, WIDE, Drawing, bits_around_a_carry, column, far_out,
                                   is_the_textbooks)
from tests.spy import SpyArray

needs_a_compiler = pytest.mark.skipif(not core.works(), reason="no C++ compiler")
COMPILED = pytest.param(kernels.COMPILED, marks=needs_a_compiler, id="compiled")
FAST = pytest.mark.parametrize("index", [pytest.param(kernels.NUMPY, id="numpy"), COMPILED])
COLUMNS = pytest.mark.parametrize("index, forms, put", [
    pytest.param(kernels.NUMPY, WIDE, np.array, id="numpy"),
    pytest.param(kernels.COMPILED, WIDE, np.array, marks=needs_a_compiler, id="compiled"),
    pytest.param(kernels.HALF, HALVES, np.array, id="half"),
    pytest.param(kernels.COMPILED_HALF, HALVES, np.array, marks=needs_a_compiler, id="compiled half"),
    pytest.param(kernels.TEXTBOOK, WIDE, SpyArray, id="textbook")])       # refuses what CuPy refuses
NOT_OF_HALVES = {"sum_of_squares"}      # but of gradients, which are float32


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Shrink the tiles, so that small arrays have many tiles, and a last one that is not full."""
    monkeypatch.setattr(cpu, "TILE", 64)
    monkeypatch.setattr(compiled, "LARGE", 1)
    monkeypatch.setattr(partial_attention, "ROOM", 128)
    monkeypatch.setattr(blockwise, "ROWS", 5)
    monkeypatch.setattr(blockwise, "FUTURE", blockwise.FUTURE[:5, :5])


# ---- the table ------------------------------------------------------------------------------------------------------


def test_the_table_names_functions_by_its_rows():
    """A function of another name than its row's would be in the wrong place; `in turn` are those of two other rows."""
    in_turn = {"drop_then_add", "add_then_norm", "multiply_then_activate", "differentiate_then_sum", "repeat_core"}
    others = {"cross_entropy_backward", "layer_norm_backward", "rms_norm_backward"}     # ours get other arguments
    for name, row in TABLE.items():
        assert {function.__name__ for function in row} - in_turn <= {name}
        twin = getattr(ops, name, getattr(online_softmax, name, None))
        assert twin is None or row.textbook is twin or name in others
    assert tuple(kernels.ACTIVATIONS) == tuple(ops.ACTIVATIONS) == ACTIVATIONS
    assert ARGUMENTS.keys() == TABLE.keys()


def test_no_kernel_is_missing_from_its_row():
    """A fast function that no column names would never run."""
    for module in (plain, cpu, partial_attention, blockwise, compiled, compiled_halves, half, fused, cuda):
        for name in vars(module).keys() & TABLE.keys():
            assert getattr(module, name) in TABLE[name], f"{module.__name__}.{name}"


def test_the_first_array_chooses_the_column(monkeypatch):
    wide, sixteen = np.ones((1, 1)), np.ones((1, 1), np.float16)
    for works in (True, False):
        monkeypatch.setattr(core, "works", lambda form, works=works: works)
        for x in (wide, wide.astype(np.float32)):
            assert kernels.column(x) == (kernels.COMPILED if works else kernels.NUMPY)
        for x in (sixteen, sixteen.astype(dtype_of("bfloat16")), (sixteen, wide), [sixteen]):
            assert kernels.column(x) == (kernels.COMPILED_HALF if works else kernels.HALF)
        assert kernels.column(SpyArray(wide)) == kernels.TEXTBOOK
    monkeypatch.setattr(cuda, "has_kernels_for", lambda x: isinstance(x, SpyArray))
    assert kernels.column(SpyArray(sixteen)) == kernels.column((SpyArray(wide), wide)) == kernels.CUDA


# ---- a column's functions, and the textbook's -----------------------------------------------------------------------


@COLUMNS
@pytest.mark.parametrize("name", ARGUMENTS)
@given(data=st.data())
def test_a_kernel_is_the_textbooks(name, index, forms, put, data):
    if index not in (kernels.HALF, kernels.COMPILED_HALF) or name not in NOT_OF_HALVES:
        # Adam's first arguments are master weights: of a model of halves they are float32.
        form = data.draw(st.sampled_from((*WIDE, *HALVES) if name == "adam_update" else forms))
        is_the_textbooks(name, Drawing(data, form, column(index), put, away=put is SpyArray,
                                       compiled=index == kernels.COMPILED_HALF))


@FAST
@settings(max_examples=2)
@given(data=st.data(), name=st.sampled_from(["attention_core", "attention_core_backward"]))
def test_attention_in_blocks_of_real_size(monkeypatch, index, name, data):
    monkeypatch.undo()
    positions = st.sampled_from([127, 129, 300])
    is_the_textbooks(name, Drawing(data, "float64", column(index), positions=positions))


def whole_blocks(most: int):
    """Draw a size, every other time one that blocks of 32 make up."""
    return st.one_of([st.integers(1, most), st.integers(1, most // 32).map(lambda n: 32 * n)][:1 + (most >= 32)])


@needs_a_compiler
@given(st.sampled_from(HALVES), st.tuples(*(whole_blocks(most) for most in (64, 1088, 2176))), st.booleans(), st.data())
def test_bits_of_a_product_of_halves_depend_on_nothing_else(form, sizes, transposed, data):
    """Neither on other rows and columns, nor on the layout: a rank that has some of them computes the same."""
    (m, n, k), rng = sizes, np.random.default_rng(data.draw(st.integers(0, 99)))
    x, w, b = (rng.normal(size=shape).astype(dtype_of(form)) for shape in ((m, k), (k, n), n))
    few, some = data.draw(st.integers(1, min(m, 20))), data.draw(whole_blocks(n))
    rows, columns = slice(m - few, m), slice(n - some, n)
    part = np.asfortranarray(w[:, columns]) if transposed else w[:, columns]
    np.testing.assert_array_equal(compiled_halves.linear(x[rows], part, b[columns]).view(np.uint16),
                                  compiled_halves.linear(x, w, b)[rows, columns].view(np.uint16))


@needs_a_compiler
@given(st.sampled_from(HALVES), st.integers(1, 2600), st.integers(0, 2**32 - 1))
def test_gradients_of_halves_are_summed_in_one_order(form, k, seed):
    """Each 512 rows are summed apart, the second of a pair first, and these sums are added in turn, on every processor.

    Products of halves are exact in float32, so NumPy has the same bits.
    """
    rng = np.random.default_rng(seed)
    x, dy = (rng.normal(size=(k, n)).astype(dtype_of(form)) for n in (15, 35))
    grad = rng.normal(size=(15, 35)).astype(np.float32)
    expected = grad.copy()
    for start in range(0, k, 512):
        part = np.zeros_like(grad)
        for row in sorted(range(start, min(start + 512, k)), key=lambda row: row ^ 1):
            part += np.outer(x[row].astype(np.float32), dy[row].astype(np.float32))
        expected += part
    compiled_halves.accumulate(grad, x, dy)
    np.testing.assert_array_equal(grad, expected)


@needs_a_compiler
@given(st.sampled_from(HALVES), st.integers(0, 2**32 - 1))
def test_halves_are_rounded_to_the_nearest_even_one(form, seed):
    """As NumPy rounds: sums of any bits, with infinities and numbers that are none; and products, which are exact."""
    rng, dtype = np.random.default_rng(seed), dtype_of(form)
    x, y = rng.integers(2**16, size=(2, 8, 512), dtype=np.uint16).view(dtype)
    row, column = (rng.normal(size=shape).astype(dtype) for shape in ((1, 512), (100, 1)))
    with np.errstate(all="ignore"):
        expected = (x.astype(np.float32) + y.astype(np.float32)).astype(dtype)
        products = (column.astype(np.float32) * row.astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(fused.add_to(y.copy(), x).astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(compiled_halves.linear(column, row).view(np.uint16), products.view(np.uint16))


# ---- numbers that are rarely drawn ----------------------------------------------------------------------------------


@FAST
@pytest.mark.parametrize("form", WIDE)
def test_far_out(index, form, recwarn):
    """Kernels are right for inputs so large that exp overflows, and NumPy does not warn."""
    far_out(column(index), form, np.array)
    assert not recwarn.list


@FAST
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_phi_is_the_normal_distribution(index, dtype):
    """To the last place of 1, on both sides of where erf goes over from one formula to the next."""
    x = np.concatenate([np.linspace(-6, 6, 20_001), np.linspace(-1.5, 1.5, 20_001)]).astype(dtype)
    _, (_, phi) = column(index).gelu_exact(x[None])
    exact = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x.tolist()])
    assert (abs(phi[0] - exact) <= np.finfo(dtype).eps).all()


@needs_a_compiler
def test_exp_of_floats():
    """Ours, within two units in the last place wherever it is a normal number; beyond, 0 and infinity."""
    x = np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1, 1, 20_001)]).astype(np.float32)
    y, zeros = x[None, None].copy(), np.zeros((1, 1), np.float32)
    fused.exp_and_sum(y, zeros)
    exact = np.exp(x.astype(np.float64))
    assert (abs(y[0, 0] - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    far = np.array([[[-np.inf, -1e30, -89, 89, 1e30, np.inf, np.nan]]], np.float32)
    fused.exp_and_sum(far, zeros)
    np.testing.assert_array_equal(far[0, 0], [0, 0, 0, np.inf, np.inf, np.inf, np.nan])


@FAST
def test_the_low_word_of_an_index_may_begin_again_within_a_row(index):
    bits_around_a_carry(column(index), np.array)


def test_bits_of_a_mask_of_real_size(monkeypatch):
    """With tiles as they are, over the 2^32nd element: a row of 4099 does not end there."""
    monkeypatch.undo()
    site = Site((2**32 - 1, 2**31), 0.1, (0, 50, 4099), (2**32 // (50 * 4099), 3, 0))
    actual, expected = (m.draw_mask(site, (2, 40, 4099), np.empty(0)) for m in (cpu, ops))
    index = ops.counter_rng.indices((2, 40, 4099), site.whole, site.first, np.empty(0))
    assert index.min() < 2**32 < index.max() and (index[..., 0] >> 32 != index[..., -1] >> 32).any()
    assert (actual.keep == expected.keep).all()
