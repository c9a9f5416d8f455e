"""Attention by cuDNN: it takes the graphs of what layers hand over, and on a GPU they compute the textbook's."""
import importlib.util
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl import kernels
from mpi_impl.kernels.cuda import flash
from mpi_impl.runtime.arrays import dtype_of
from reference import ops
from tests.gpu import device
from tests.gpu.test_kernels import gpu, same  # noqa: F401 - gpu is a fixture
from tests.installed import installed
from tests.kernel_theorems import HALVES, WORDS
from tests.reference.test_ops import lengths


@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs cuDNN: pip install '.[cudnn12]'")
@pytest.mark.parametrize("form", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_cudnn_takes_the_graphs(form, causal, padded):
    """q, k and v are views of one array, and so are their gradients. Without a GPU only the descriptions are made."""
    b, s, a, d = shape = 2, 64, 4, 96
    views, whole = (s * 3 * a * d, 3 * a * d, d, 1), (s * a * d, a * d, d, 1)
    forward = [*((name, shape, views) for name in "qkv"), ("context", shape, whole)]
    backward = [*forward, ("dcontext", shape, whole), *((name, shape, views) for name in ("dq", "dk", "dv"))]
    for build, layouts in ((flash.forward_graph, forward), (flash.backward_graph, backward)):
        if device.REAL:
            _, numbers = flash.build_plan(build, tuple(layouts), form, causal, padded, 0)
        else:
            _, numbers = flash.describe_graph(build, tuple(layouts), form, causal, padded)
        more = {"stats", "queries", "keys"} if padded else {"stats"}
        assert numbers.keys() == {name for name, *_ in layouts} | more


def are_the_textbooks(seed, form, shape, causal, real, caches):
    """Compare attention, and its gradients from these caches, with the textbook's; those of padding are exactly 0."""
    rng, (b, s, a, d) = np.random.default_rng(seed), shape
    qkv, dcontext = (rng.normal(size=size).astype(dtype_of(form)) for size in ((b, s, 3, a, d), shape))
    on_device, exact = device.put(qkv), qkv.astype(np.float64)
    mine = [on_device[:, :, i] for i in range(3)]
    y, cache = kernels.attention_core(*mine, causal, None, device.put(real))
    expected, expected_cache = ops.attention_core(*(exact[:, :, i] for i in range(3)), causal, None, real)
    same(y, expected, form, 4)
    wanted = ops.attention_core_backward(dcontext.astype(np.float64), expected_cache)
    for one in caches(mine, cache, y):
        found = kernels.attention_core_backward(device.put(dcontext), one)
        for actual, gradient in zip(found, wanted, strict=True):
            same(actual, gradient, form, 16)
        if real is not None:
            assert all((gradient.get()[np.arange(s) >= real[:, None]] == 0).all() for gradient in found[1:])
    return cache


@pytest.mark.skipif(device.REAL, reason="a cuDNN that declines everything")
def test_what_cudnn_declines_other_kernels_compute(monkeypatch):
    """The forward, and the backward where only that is declined. It is said once."""
    def decline(**_):
        raise RuntimeError("no kernel for this GPU")

    def caches(inputs, cache, y):
        b, s, a, _ = y.shape
        return cache, flash.FlashCache(*inputs, True, None, y, device.put(np.zeros((b, a, s, 1))))

    monkeypatch.setattr(flash, "is_available", lambda: True)
    flash.say_that_cudnn_declines.cache_clear()
    monkeypatch.setattr(flash, "current_handle", lambda: None)
    cudnn = SimpleNamespace(pygraph=decline, data_type=SimpleNamespace(HALF=0, FLOAT=1))
    with installed({"cudnn": cudnn}), pytest.warns(match="no kernel for this GPU") as said:
        for s in (4, 5):
            cache = are_the_textbooks(1, "float16", (2, s, 3, 8), True, None, caches)
    assert isinstance(cache, ops.CoreInputs) and len(said) == 1


@device.needs_a_gpu
@pytest.mark.skipif(device.REAL and not flash.is_available(), reason="needs cuDNN: pip install '.[cudnn12]'")
@settings(max_examples=20)
@given(st.data(), st.integers(1, 3), st.integers(2, 200), st.integers(1, 3), st.sampled_from([8, 16, 64, 96, 128]),
       st.booleans(), st.sampled_from(HALVES), WORDS)
def test_it_is_the_textbooks(data, b, s, a, d, causal, form, seed):
    cache = are_the_textbooks(seed, form, (b, s, a, d), causal, data.draw(lengths(b, s)), lambda _, cache, y: [cache])
    assert isinstance(cache, flash.FlashCache) or min(s, d) < 32, "cuDNN documents no limit that would exclude this"


@pytest.mark.parametrize("change", [{"site": "drops"}, {"form": np.float32}, {"d": 12}, {"d": 256}, {"s": 1}])
def test_what_it_does_not_take(change, monkeypatch):
    """Dropout, wide formats, heads of odd sizes, a single word: for these there are the other kernels."""
    monkeypatch.setattr(flash, "is_available", lambda: True)
    monkeypatch.setattr(flash, "plan", lambda *_: "a plan")
    plain = {"site": None, "form": np.float16, "d": 64, "s": 2}
    for case, taken in ((plain, True), (plain | change, False)):
        q = np.zeros((1, case["s"], 3, case["d"]), case["form"])
        assert flash.supports(ops.CoreInputs(q, q, q, True, case["site"])) is taken


def test_an_evaluation_of_many_lengths_builds_each_plan_once(monkeypatch):
    built, graph = [], MagicMock()
    monkeypatch.setattr(flash, "describe_graph", lambda _, layouts, *more: built.append(layouts) or (graph, {}))
    monkeypatch.setattr(flash, "current_handle", lambda: None)
    lengths_seen = [(("q", (1, s, 2, 64), (s * 128, 128, 64, 1)),) for s in range(2, 502)]
    with installed({"cudnn": MagicMock()}):
        for layouts in 2 * lengths_seen:
            flash.build_plan(flash.forward_graph, layouts, "float16", True, False, 7)
    flash.build_plan.cache_clear()
    assert built == lengths_seen
