"""Every fast spelling is its textbook twin, on shapes that do not fit its tiles."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_impl.kernels import cpu
from reference import ops
from tests.strategies import close

SEEDS = st.integers(0, 2**32 - 1)
ROWS = st.integers(1, 300)          # tiles are cut short by a small TILE below


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that small arrays have many tiles, and a last one that is not full."""
    monkeypatch.setattr(cpu, "TILE", 64)
    monkeypatch.setattr(cpu, "ATTENTION_ROWS", 5)
    monkeypatch.setattr(cpu, "FUTURE", cpu.FUTURE[:5, :5])


def draw(seed, dtype, *shape):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def same(actual, expected, dtype):
    assert actual.dtype == expected.dtype == dtype
    close(actual, expected, 1e-11 if dtype == np.float64 else 1e-4)


@given(ROWS, st.integers(1, 90), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_gelu(n, h, dtype, seed):
    x, dy = draw(seed, dtype, 1, n, h), draw(seed + 1, dtype, 1, n, h)
    (y, cache), (expected, expected_cache) = cpu.gelu(x), ops.gelu(x)
    same(y, expected, dtype)
    same(cpu.gelu_backward(dy, cache), ops.gelu_backward(dy, expected_cache), dtype)


@given(ROWS, st.integers(2, 90), st.sampled_from([np.float64, np.float32]), SEEDS)
def test_layer_norm(n, h, dtype, seed):
    x, dy = draw(seed, dtype, 1, n, h) + dtype(3), draw(seed + 1, dtype, 1, n, h)
    weight, bias = draw(seed, dtype, h), draw(seed + 1, dtype, h)
    (y, cache), (expected, expected_cache) = (m.layer_norm(x, weight, bias, 1e-3) for m in (cpu, ops))
    same(y, expected, dtype)
    for actual, wanted in zip(cpu.layer_norm_backward(dy, weight, cache),
                              ops.layer_norm_backward(dy, weight, expected_cache), strict=True):
        same(actual, wanted, dtype)


@given(st.integers(1, 3), st.integers(1, 23), st.integers(1, 3), st.integers(1, 6), st.booleans(),
       st.sampled_from([np.float64, np.float32]), SEEDS)
def test_attention_core(b, s, a, d, causal, dtype, seed):
    """q, k and v as the layer hands them over: views of one array."""
    q, k, v = (draw(seed, dtype, b, s, 3, a, d)[:, :, i] for i in range(3))
    dcontext = draw(seed + 1, dtype, b, s, a, d)
    (y, cache), (expected, expected_cache) = (m.attention_core(q, k, v, causal) for m in (cpu, ops))
    same(y, expected, dtype)
    for actual, wanted in zip(cpu.attention_core_backward(dcontext, cache),
                              ops.attention_core_backward(dcontext, expected_cache), strict=True):
        same(actual, wanted, dtype)
