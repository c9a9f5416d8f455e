"""The spy refuses what CuPy refuses or does slowly without a word, and has the functions that CuPy has.

That it permits what CuPy permits, layers and kernels show that run on it.
"""
import inspect
import re

import numpy as np
import pytest

from mpi_impl.kernels.cuda import cublas
from mpi_impl.runtime.arrays import dtype_of
from tests.fake_cuda import CODES, OPS, FakeCommunicator
from tests.spy import CREATION, FUNCTIONS, METHODS, UFUNC_METHODS, UFUNCS_LACKING, Refused, SpyArray

HOST = np.arange(6.0).reshape(2, 3)
REFUSED = {     # what, and a word of the sentence
    "a hidden copy to the host": (lambda x: np.asarray(x), "x.get()"),
    "a host array as an index": (lambda x: x[np.array([0, 1])], "index on the host"),
    "reading through a mask": (lambda x: x[x > 2], "np.where"),
    "truth": (lambda x: bool(x[0, 0] > 1), "x.item()"),
    "elements one by one": (lambda x: list(x[0]), "all at once"),
    "a product of three dimensions": (lambda x: x[None] @ x.T[None], "np.matmul"),
    "a function that CuPy lacks": (lambda x: np.block([[x, x]]), "np.block"),
    "a ufunc's method that CuPy lacks": (lambda x: np.maximum.reduce(x), "np.maximum.reduce"),
    "too many arguments": (lambda x: x.sum(0, None, None, False, 0.0), "at most 4"),
    "getting later into what is not pinned": (lambda x: x.get(out=HOST.copy(), blocking=False), "pinned"),
    "MPI ahead of the device": (lambda x: np.add(x, 1, out=x).__cuda_array_interface__, "synchronise"),
    "setting a view with gaps": (lambda x: x[:, ::2].set(HOST[:, ::2]), "not contiguous"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_go_wrong_on_a_device_is_refused(what):
    action, word = REFUSED[what]
    with pytest.raises(Refused, match=re.escape(word)):
        action(SpyArray(HOST))


def test_transfers_are_copies_and_slices_are_views():
    """Of which others see where they lie, once the device is done."""
    host = HOST.copy()
    x = same = SpyArray(host)
    host[0, 0] = x.get()[0, 0] = 99
    assert x[0, 0].item() == 0 and not hasattr(x, "ctypes")
    x[0][1] = 70
    x.T[2, :] += 10
    x.reshape(-1)[4:5].set(np.array([40.0]))
    x @= SpyArray(2 * np.eye(3))
    np.add.at(x[:, 0], SpyArray(np.array([1, 1])), 1.0)
    assert x is same and x.get().tolist() == [[0, 140, 24], [8, 80, 30]]
    seen = x[:, 1:].__cuda_array_interface__
    assert seen == {"shape": (2, 2), "typestr": "<f8", "data": (x.data.ptr + 8, False), "version": 3,
                    "strides": (24, 8)}
    assert x.__cuda_array_interface__["strides"] is None and x.reshape(3, 2)[1:].data.ptr == x.data.ptr + 16


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


def test_cublas_has_these_calls_and_cupy_these_codes():
    cupy = pytest.importorskip("cupy")
    try:
        from cupy_backends.cuda.libs import cublas as theirs
    except ImportError:
        pytest.skip("CuPy finds no cuBLAS")
    for name, ours in (("setMathMode", "SetMathMode"), ("setStream", "SetStream_v2"), ("gemmEx", "GemmEx"),
                       ("gemmStridedBatchedEx", "GemmStridedBatchedEx")):
        assert len(taken_by_cupy(getattr(theirs, name))) == len(getattr(cublas.library(), f"cublas{ours}").argtypes)
    codes = {"float64": "64F", "float32": "32F", "float16": "16F", "bfloat16": "16BF"}
    assert {dtype_of(name): getattr(cupy.cuda.runtime, f"CUDA_R_{code}")
            for name, code in codes.items()} == cublas.FORMATS
    assert {dtype_of(name): getattr(theirs, f"CUBLAS_COMPUTE_{codes[name]}")
            for name in ("float64", "float32")} == cublas.COMPUTE


def test_cupy_records():
    cupy = pytest.importorskip("cupy")
    for owner, names in ((cupy.cuda.Stream, "begin_capture end_capture"), (cupy.cuda.MemoryPool, "malloc"),
                         (cupy.cuda, "using_allocator"), (cupy.cuda.graph.Graph, "launch")):
        assert all(hasattr(owner, name) for name in names.split())
