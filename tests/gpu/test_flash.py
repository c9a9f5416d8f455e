"""Attention by cuDNN: its graphs are valid for the arrays that layers hand over, and on a GPU it is the textbook's."""
import ctypes
import importlib.util
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl import kernels
from mpi_impl.kernels.cuda import flash
from reference import ops
from tests.gpu import device
from tests.gpu.test_kernels import SEEDS, draw, gpu, same, wide  # noqa: F401 - gpu is a fixture
from tests.installed import installed
from tests.reference.test_ops import lengths

HALVES = st.sampled_from(["float16", "bfloat16"])


@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs cuDNN: pip install '.[cudnn12]'")
@pytest.mark.parametrize("form", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_graphs_are_valid(form, causal, padded):
    """q, k and v are views of one array; the others have one each. This needs the library, and no GPU."""
    b, s, a, d = shape = 2, 64, 4, 96
    views, whole = (s * 3 * a * d, 3 * a * d, d, 1), (s * a * d, a * d, d, 1)
    forward = [*((name, shape, views) for name in "qkv"), ("context", shape, whole)]
    backward = [*forward, *((name, shape, whole) for name in ("dcontext", "dq", "dk", "dv"))]
    for build, layouts in ((flash.forward_graph, forward), (flash.backward_graph, backward)):
        _, numbers = flash.describe_graph(build, tuple(layouts), form, causal, padded)
        more = {"stats", "queries", "keys"} if padded else {"stats"}
        assert numbers.keys() == {name for name, *_ in layouts} | more


@device.needs_a_gpu
@pytest.mark.skipif(device.REAL and not flash.is_available(), reason="needs cuDNN: pip install '.[cudnn12]'")
@settings(max_examples=20)
@given(st.data(), st.integers(1, 3), st.integers(2, 200), st.integers(1, 3), st.sampled_from([8, 16, 64, 96, 128]),
       st.booleans(), HALVES, SEEDS)
def test_it_is_the_textbooks(data, b, s, a, d, causal, form, seed):
    """Gradients of padding are exactly 0."""
    qkv, dcontext, real = draw(seed, form, b, s, 3, a, d), draw(seed + 1, form, b, s, a, d), data.draw(lengths(b, s))
    on_device = device.put(qkv)
    y, cache = kernels.attention_core(*(on_device[:, :, i] for i in range(3)), causal, None, device.put(real))
    assert isinstance(cache, flash.FlashCache) or min(s, d) < 32, "cuDNN documents no limit that would exclude this"
    expected, expected_cache = ops.attention_core(*(wide(qkv)[0][:, :, i] for i in range(3)), causal, None, real)
    same(y, expected, form, 4)
    wanted = ops.attention_core_backward(*wide(dcontext), expected_cache)
    found = kernels.attention_core_backward(device.put(dcontext), cache)
    for actual, one in zip(found, wanted, strict=True):
        same(actual, one, form, 16)
    if real is not None:
        assert all((gradient.get()[np.arange(s) >= real[:, None]] == 0).all() for gradient in found[1:])


@pytest.mark.parametrize("change", [{"site": "drops"}, {"form": np.float32}, {"d": 12}, {"d": 256}, {"s": 1}])
def test_what_it_does_not_take(change, monkeypatch):
    """Dropout, wide formats, heads of odd sizes, a single word: for these there are the other kernels."""
    monkeypatch.setattr(flash, "is_available", lambda: True)
    plain = {"site": None, "form": np.float16, "d": 64, "s": 2}
    for case, taken in ((plain, True), (plain | change, False)):
        q = np.zeros((1, case["s"], 3, case["d"]), case["form"])
        assert flash.supports(ops.CoreInputs(q, q, q, True, case["site"])) is taken


def test_an_evaluation_of_many_lengths_builds_each_plan_once(monkeypatch):
    built = []
    monkeypatch.setattr(flash, "describe_graph", lambda _, layouts, *more: built.append(layouts) or (MagicMock(), {}))
    monkeypatch.setattr(flash, "handle", lambda device: None)
    lengths_seen = [(("q", (1, s, 2, 64), (s * 128, 128, 64, 1)),) for s in range(2, 502)]
    with installed({"cudnn": MagicMock()}):
        for layouts in 2 * lengths_seen:
            flash.build_plan(flash.forward_graph, layouts, "float16", True, False, 7)
    flash.build_plan.cache_clear()
    assert built == lengths_seen


class FakeGraph:
    """Is told how many queries and keys are real; leaves no numbers in the gradients."""

    def get_workspace_size(self):
        return 0

    def execute(self, pointers, workspace, handle):
        self.told = {name: memory(pointers[name], np.int32, 2).tolist() for name in ("queries", "keys")}
        for name in ("dq", "dk", "dv"):
            memory(pointers[name], np.float16, 2 * 4 * 3 * 8)[...] = np.nan


def memory(address, dtype, elements):
    return np.frombuffer((ctypes.c_char * (elements * np.dtype(dtype).itemsize)).from_address(address), dtype)


@pytest.mark.skipif(device.REAL, reason="a host's addresses")
def test_what_it_leaves_in_padding_becomes_0(monkeypatch):
    """Whatever that is; all other gradients stay as they are. It is told that queries there are real."""
    graph, numbers = FakeGraph(), {name: name for name in "q k v context dcontext dq dk dv stats queries keys".split()}
    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(id=0), get_current_stream=lambda: SimpleNamespace(ptr=0))
    monkeypatch.setattr(flash, "build_plan", lambda *arguments: (graph, numbers))
    monkeypatch.setattr(flash, "handle", lambda device: None)
    q, stats = device.put(np.zeros((2, 4, 3, 8), np.float16)), device.put(np.zeros((2, 3, 4, 1), np.float32))
    cache = flash.FlashCache(q, q, q, False, device.put(np.array([3, 1])), q, stats)
    with installed({"cupy": SimpleNamespace(cuda=cuda, empty=lambda *_: q),
                    "cudnn": SimpleNamespace(set_stream=lambda **_: None)}):
        dq, dk, dv = (gradient.get() for gradient in flash.attention_core_backward(q, cache))
    assert graph.told == {"queries": [4, 4], "keys": [3, 1]}
    real = np.arange(4) < np.array([[3], [1]])
    assert np.isnan(dq).all()
    assert all(np.isnan(x[real]).all() and (x[~real] == 0).all() for x in (dk, dv))
