"""The spy permits what CuPy permits, and refuses what CuPy refuses or does slowly without a word."""
import inspect
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.fake_cuda import CODES, OPS, FakeCommunicator
from tests.gpu.emulated import FakeCublas
from tests.spy import CREATION, FUNCTIONS, METHODS, UFUNC_METHODS, UFUNCS_LACKING, Refused, SpyArray, to_device, to_host

HOST = np.arange(6.0).reshape(2, 3)
X = SpyArray(HOST)
INDEX = SpyArray(np.array([1, 0]))

PERMITTED = {
    "operators": (lambda x: (2 * x + x / 3 - x ** 2) @ x.T),
    "numpy scalars": (lambda x: np.float64(2) * x + x * np.float32(1)),
    "comparison and where": (lambda x: np.where(x > 2, x, 0.0)),
    "ufuncs": (lambda x: np.maximum(np.tanh(np.exp(-x)), 0.5)),
    "reductions": (lambda x: x - x.max(axis=-1, keepdims=True) + np.mean(x, 0) + x.sum()),
    "a reduction to a number": (lambda x: np.sum(x)),
    "a ufunc's reduce": (lambda x: np.add.reduce(x, axis=0)),
    "slices": (lambda x: x[:, 1:][..., None]),
    "one element": (lambda x: x[1, 2]),
    "shapes": (lambda x: x.reshape(3, 2).T.swapaxes(0, 1).transpose(1, 0).ravel()),
    "joining": (lambda x: np.concatenate([x, np.stack([x[0], x[1]])], axis=1)),
    "splitting": (lambda x: np.split(x, 3, axis=1)[2]),
    "unpacking along the first axis": (lambda x: (lambda first, second: first * second)(*x)),
    "creation in its image": (lambda x: np.zeros_like(x) + np.full_like(x, 2.0, shape=(1, 3))),
    "creation with like": (lambda x: x[:1] + np.arange(3.0, like=x) + np.zeros(3, like=x)),
    "a visible transfer": (lambda x: x + np.asarray(np.ones(3), like=x)),
    "types": (lambda x: x.astype(np.float32).view(np.uint32)),
    "einsum": (lambda x: np.einsum("ij,kj->ik", x, x)),
    "triangles": (lambda x: np.tril(x)),
    "cumulative sums": (lambda x: x.cumsum(axis=1)),
    "broadcasting": (lambda x: np.broadcast_to(x[0], (4, 3)).copy()),
}


@pytest.mark.parametrize("what", PERMITTED)
def test_what_cupy_permits_gives_numpys_result_on_the_device(what):
    on_device, on_host = PERMITTED[what](X), PERMITTED[what](HOST)
    assert isinstance(on_device, SpyArray)
    assert on_device.shape == np.shape(on_host) and on_device.dtype == np.asarray(on_host).dtype
    np.testing.assert_array_equal(on_device.get(), on_host)


REFUSED = {
    "a hidden copy to the host": (lambda x: np.asarray(x), "x.get()"),
    "another one": (lambda x: np.ascontiguousarray(x), "x.get()"),
    "a comparison on the host": (lambda x: np.testing.assert_allclose(x, HOST), "x.get()|np."),
    "a host array on the left": (lambda x: HOST + x, "mix in a host array"),
    "a host array on the right": (lambda x: x + HOST, "mix in a host array"),
    "a host array of no dimensions": (lambda x: x + np.array(1.0), "mix in a host array"),
    "a host array that is changed in place": (lambda x: np.add(HOST.copy(), x, out=HOST.copy()), "mix in"),
    "a host array in a function": (lambda x: np.concatenate([x, HOST]), "mix in a host array"),
    "a host array to choose by": (lambda x: np.where(HOST > 1, x, 0), "mix in a host array"),
    "a host array as an index": (lambda x: x[np.array([0, 1])], "index on the host"),
    "a list as an index": (lambda x: x[[0, 1]], "index on the host"),
    "a host index to write to": (lambda x: x.__setitem__(np.array([0]), 1.0), "index on the host"),
    "writing a host array": (lambda x: x.__setitem__(0, np.ones(3)), "refuses to assign"),
    "a list as an operand": (lambda x: x + [1.0, 2.0, 3.0], "not list"),
    "reading through a mask": (lambda x: x[x > 2], "np.where"),
    "truth": (lambda x: bool(x[0, 0] > 1), "x.item()"),
    "if": (lambda x: 1 if x.sum() > 0 else 2, "x.item()"),
    "float": (lambda x: float(x.sum()), "x.item()"),
    "int": (lambda x: int(x.sum()), "x.item()"),
    "range": (lambda x: range(INDEX[0]), "x.item()"),
    "elements one by one": (lambda x: list(x[0]), "all at once"),
    "a product of three dimensions": (lambda x: x[None] @ x.T[None], "float16 in float32"),
    "a function that CuPy lacks": (lambda x: np.block([[x, x]]), "CuPy has no np.block"),
    "a ufunc that CuPy lacks": (lambda x: np.vecdot(x, x), "CuPy has no np.vecdot"),
    "a ufunc's method that CuPy lacks": (lambda x: np.maximum.reduce(x), "CuPy has no np.maximum.reduce"),
    "a condition on a reduction": (lambda x: np.sum(x, where=x > 1), "takes no `where`"),
    "a condition on a ufunc": (lambda x: np.exp(x, where=x > 1), "takes no `where`"),
    "a start of a reduction": (lambda x: x.max(initial=0.0), "takes no `initial`"),
    "a keyword that CuPy spells otherwise": (lambda x: np.reshape(x, shape=(3, 2)), "takes no `shape`"),
    "too many arguments": (lambda x: x.sum(0, None, None, False, 0.0), "at most 4"),
    "getting into an array with gaps": (lambda x: x.get(out=HOST.copy()[:, ::-1]), "contiguous host array"),
    "getting into another type": (lambda x: x.get(out=HOST.astype(np.float32)), "converts nothing"),
    "getting into another shape": (lambda x: x.get(out=HOST[0].copy()), "converts nothing"),
    "MPI ahead of the device": (lambda x: np.add(x, 1, out=x).__cuda_array_interface__, "synchronise first"),
    "setting a number": (lambda x: x.set(1.0), "takes a host array"),
    "setting another type": (lambda x: x.set(HOST.astype(np.float32)), "converts nothing"),
    "setting another shape": (lambda x: x.set(HOST[0]), "converts nothing"),
    "setting a view with gaps": (lambda x: x[:, ::2].set(HOST[:, ::2]), "not contiguous"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_go_wrong_on_a_device_is_refused_in_a_sentence(what):
    action, said = REFUSED[what]
    with pytest.raises(Refused, match=said) as refusal:
        action(SpyArray(HOST))
    assert re.fullmatch(r"(CuPy|A|An|N|R|I|np\.|If).*[.)]", str(refusal.value).splitlines()[0])


def test_an_attribute_that_the_spy_lacks_is_missing():
    assert not hasattr(X, "ctypes")
    with pytest.raises(AttributeError, match="has no `ctypes`"):
        _ = X.ctypes


def test_slices_are_views_that_write_through():
    x = SpyArray(HOST)
    x[0][1] = 70
    x.T[2, :] += 10
    x[1, 0][...] = 30
    x.reshape(-1)[4:5].set(np.array([40.0]))
    x[:, :1] *= SpyArray(np.array([[1.0], [2.0]]))
    np.testing.assert_array_equal(x.get(), [[0, 70, 12], [60, 40, 15]])


def test_others_see_where_the_elements_lie_once_they_are_there():
    x = SpyArray(HOST)
    x += 1
    out = np.empty((2, 3))
    assert x.get(out=out) is out and (out == HOST + 1).all()       # the host has waited
    seen = x[:, 1:].__cuda_array_interface__
    assert seen == {"shape": (2, 2), "typestr": "<f8", "data": (x.data.ptr + 8, False), "version": 3,
                    "strides": (24, 8)}
    assert x.__cuda_array_interface__["strides"] is None and x.reshape(3, 2)[1:].data.ptr == x.data.ptr + 16


def test_in_place_operators_and_out_keep_the_array():
    x = same = SpyArray(HOST)
    x += 1
    x @= SpyArray(np.eye(3))
    assert np.multiply(x, 2, out=x) is same and x is same
    np.sum(X, axis=0, out=x[0])
    np.testing.assert_array_equal(x.get(), [[3, 5, 7], [8, 10, 12]])


def test_scattered_sums_work():
    x = SpyArray(np.zeros(2))
    np.add.at(x, SpyArray(np.array([1, 1, 0])), SpyArray(np.array([1.0, 2.0, 4.0])))
    np.testing.assert_array_equal(x.get(), [4, 3])
    x[INDEX] = SpyArray(np.array([5.0, 6.0]))
    x[x > 5.5] = 0.0
    np.testing.assert_array_equal(x.get(), [0, 5])


def test_transfers_are_copies():
    host = HOST.copy()
    x = SpyArray(host)
    host[0, 0] = x.get()[0, 0] = 99
    assert x[0, 0].item() == 0


class Cache(NamedTuple):
    x: object
    scale: float


@dataclass(frozen=True)
class Weights:
    w: object
    b: object = None


def test_whole_structures_move_to_the_device_and_back():
    there = to_device([Cache(HOST, 2.0), {"weights": Weights(HOST)}])
    assert isinstance(there[0].x, SpyArray) and isinstance(there[1]["weights"].w, SpyArray)
    back = to_host(there)
    assert type(back[0]) is Cache and back[0].scale == 2.0 and back[1]["weights"].b is None
    np.testing.assert_array_equal(back[1]["weights"].w, HOST)


# --- on ranks

def collectives(group, host):
    """Assert that every collective gives the same on host arrays and on spies, and never a host array from a spy."""
    for call in (lambda x: group.all_reduce(x, "test"), lambda x: group.all_reduce(x, "test", op="max"),
                 lambda x: group.all_gather(x, 1, "test"), lambda x: group.reduce_scatter(x, 0, "test"),
                 lambda x: group.broadcast(x, "test")):
        mine = host * (group.rank + 1)
        on_device = call(SpyArray(mine))
        assert isinstance(on_device, SpyArray)
        np.testing.assert_array_equal(on_device.get(), call(mine))


@given(n=st.integers(1, 8))
def test_collectives_work_on_device_arrays(ranks, n):
    ranks.run(n, collectives, np.arange(n * 6.0).reshape(2 * n, 3))


# --- against CuPy itself, where it is installed (a GPU is not needed)

def taken_by_cupy(function):
    """Return the parameters of a CuPy function, or of a compiled method, whose docstring begins with its signature."""
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        first = function.__doc__.splitlines()[0]
        named = re.search(r"\((.*)\)", first)[1].split(", ")
        return [re.sub(r"=.*", "", parameter).split(" ")[-1] for parameter in named]


def test_cupy_has_the_functions_with_these_parameters():
    cupy = pytest.importorskip("cupy")
    for name, parameters in (FUNCTIONS | CREATION).items():
        function = cupy
        for part in name.split("."):
            function = getattr(function, part)
        if name not in ("size", "einsum", "pad"):   # compiled without a signature, or taking any keyword
            theirs = [p for p in taken_by_cupy(function) if p != "blocking"]
            assert [p.lstrip("*") for p in parameters] == theirs[:len(parameters)], name


def test_cupy_has_the_methods_with_these_parameters():
    cupy = pytest.importorskip("cupy")
    for name, parameters in METHODS.items():
        theirs = taken_by_cupy(getattr(cupy.ndarray, name))
        assert parameters == theirs[1:][:len(parameters)], name


def test_cupy_has_the_ufuncs_but_those():
    cupy = pytest.importorskip("cupy")
    ufuncs = {name for name in dir(np) if isinstance(getattr(np, name), np.ufunc)}
    assert {name for name in ufuncs if not hasattr(cupy, name)} == UFUNCS_LACKING
    assert all(hasattr(cupy.add, method) for method in UFUNC_METHODS)


def test_cupys_nccl_has_these_calls_and_codes():
    cupy = pytest.importorskip("cupy")
    from cupy.cuda import nccl
    if not nccl.available:
        pytest.skip("CuPy finds no NCCL")
    assert {name: getattr(nccl, f"NCCL_{name}") for name in CODES | OPS} == CODES | OPS
    for name in ("allReduce", "allGather", "reduceScatter", "broadcast"):
        ours = list(inspect.signature(getattr(FakeCommunicator, name)).parameters)
        assert ["self", *taken_by_cupy(getattr(nccl.NcclCommunicator, name))[-len(ours) + 1:]] == ours, name
    assert taken_by_cupy(nccl.NcclCommunicator)[:3] == ["ndev", "commId", "rank"]
    assert taken_by_cupy(cupy.cuda.Event)[:2] == ["block", "disable_timing"] and hasattr(cupy.cuda.Event, "done")
    assert taken_by_cupy(cupy.ndarray.get)[-2:] == ["out", "blocking"] and hasattr(cupy.ndarray, "device")
    for owner, names in ((cupy.cuda.Stream, "record wait_event synchronize"), (cupy.cuda, "alloc_pinned_memory"),
                         (cupy.cuda.Event, "record synchronize"),
                         (cupy.cuda.runtime, "memGetInfo deviceGetPCIBusId getDeviceProperties")):
        assert all(hasattr(owner, name) for name in names.split())
    assert len(nccl.get_unique_id()) == 128


def test_cupys_cublas_has_these_calls_and_codes():
    pytest.importorskip("cupy")
    try:
        from cupy_backends.cuda.libs import cublas
    except ImportError:
        pytest.skip("CuPy finds no cuBLAS")
    for name in ("setMathMode", "gemmEx", "gemmStridedBatchedEx"):
        assert taken_by_cupy(getattr(cublas, name)) == taken_by_cupy(getattr(FakeCublas, name)), name
    for name in ("CUBLAS_COMPUTE_32F", "CUBLAS_COMPUTE_64F"):
        assert getattr(cublas, name) == getattr(FakeCublas, name)


def test_cupy_compiles_for_the_gpu_itself():
    """And not to PTX, which a driver does not take from a compiler that is newer than itself."""
    pytest.importorskip("cupy")
    from cupy.cuda import compiler
    assert compiler._get_arch_for_options_for_nvrtc.__wrapped__("90") == ("-arch=sm_90", "cubin")
