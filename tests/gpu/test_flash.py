"""Attention by cuDNN: its graphs are valid for the arrays that layers hand over, and on a GPU it is the textbook's."""
import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_impl import kernels
from mpi_impl.kernels.cuda import flash
from reference import ops
from tests.gpu import device
from tests.gpu.test_kernels import SEEDS, draw, gpu, same, wide    # noqa: F401 - gpu is a fixture

HALVES = st.sampled_from(["float16", "bfloat16"])


@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs cuDNN: pip install '.[cudnn12]'")
@pytest.mark.parametrize("form", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
def test_graphs_are_valid(form, causal):
    """q, k and v are views of one array; the others have one each. This needs the library, and no GPU."""
    b, s, a, d = shape = 2, 64, 4, 96
    views, whole = (s * 3 * a * d, 3 * a * d, d, 1), (s * a * d, a * d, d, 1)
    forward = [*((name, shape, views) for name in "qkv"), ("context", shape, whole)]
    backward = [*forward, *((name, shape, whole) for name in ("dcontext", "dq", "dk", "dv"))]
    for build, layouts in ((flash.forward_graph, forward), (flash.backward_graph, backward)):
        _, numbers = flash.described(build, tuple(layouts), form, causal)
        assert numbers.keys() == {name for name, *_ in layouts} | {"stats"}


@device.needs_a_gpu
@pytest.mark.skipif(device.REAL and not flash.is_there(), reason="needs cuDNN: pip install '.[cudnn12]'")
@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(2, 200), st.integers(1, 3), st.sampled_from([8, 16, 64, 96, 128]), st.booleans(),
       HALVES, SEEDS)
def test_it_is_the_textbooks(b, s, a, d, causal, form, seed):
    qkv, dcontext = draw(seed, form, b, s, 3, a, d), draw(seed + 1, form, b, s, a, d)
    on_device = device.put(qkv)
    y, cache = kernels.attention_core(*(on_device[:, :, i] for i in range(3)), causal, None)
    assert isinstance(cache, flash.FlashCache)
    expected, expected_cache = ops.attention_core(*(wide(qkv)[0][:, :, i] for i in range(3)), causal)
    same(y, expected, form, 4)
    wanted = ops.attention_core_backward(*wide(dcontext), expected_cache)
    for actual, one in zip(kernels.attention_core_backward(device.put(dcontext), cache), wanted, strict=True):
        same(actual, one, form, 16)


@pytest.mark.parametrize("change", [{"site": "drops"}, {"form": np.float32}, {"d": 12}, {"d": 256}, {"s": 1}])
def test_what_it_does_not_take(change, monkeypatch):
    """Dropout, wide formats, heads of odd sizes, a single word: for these there are the other kernels."""
    monkeypatch.setattr(flash, "is_there", lambda: True)
    plain = {"site": None, "form": np.float16, "d": 64, "s": 2}
    for case, taken in ((plain, True), (plain | change, False)):
        q = np.zeros((1, case["s"], 3, case["d"]), case["form"])
        assert flash.takes(ops.CoreInputs(q, q, q, True, case["site"])) is taken
