"""A GPU that is not there: our CUDA kernels compiled for the CPU, and cuBLAS's calls, on the elements behind spies.

`with gpu():` the kernels of mpi_impl/kernels/fused work on spies. The kernels are the very sources that a GPU gets,
and are started as CuPy starts them, with pointers and numbers; of cuBLAS there are the calls that we make, by their
definition, on column after column of bare memory. So what is proven here is all that is ours: indices, formulas,
rounding, strides, the order of arguments. What a GPU's own compiler and libraries do is not.
"""
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import ml_dtypes
import numpy as np

from mpi_impl.kernels import cuda
from mpi_impl.kernels.cuda import cublas
from mpi_impl.kernels.fused import launcher
from mpi_impl.runtime.arrays import counter_of
from tests.installed import installed
from tests.spy import QUEUE, SpyArray, compute_into, leaves

HEADER = Path(__file__).with_name("emulated.h")
COMPILER = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
THREADS = 64        # of a block: two warps


@contextmanager
def gpu():
    """Give spies kernels for the duration of the `with` block."""
    modules = {"cupy": FakeCupy(), "cupy.cuda": FakeCupy.cuda, "cupy.cuda.device": FakeCupy.cuda.device}
    with installed(modules), mock.patch.object(launcher, "function", compiled_function), \
            mock.patch.object(cublas, "library", lambda: FakeCublas), mock.patch.object(launcher, "THREADS", THREADS), \
            mock.patch.object(cuda, "has_kernels_for", lambda x: isinstance(x, SpyArray) or counter_of(x) is not None):
        yield


# ---- kernels --------------------------------------------------------------------------------------------------------


def text_of(file: str) -> str:
    return (launcher.FOLDER / file).read_text()


def kernels() -> list[tuple[str, str]]:
    """Return the file and the name of every kernel that the sources define."""
    found = [(source, name) for source in launcher.SOURCES
             for name in re.findall(r'extern "C" __global__ void (\w+)\(', text_of(f"{source}.cu"))]
    assert len(found) == sum(text_of(f"{source}.cu").count("__global__") for source in launcher.SOURCES)
    return found


def translation_unit() -> str:
    """Return the text of all sources, each in its own namespace, and of the functions that launch their kernels."""
    parts = [HEADER.read_text(), text_of("common.cuh"), "HALVES"]
    for source in launcher.SOURCES:
        starts = [f"STARTS({name})" for its_source, name in kernels() if its_source == source]
        parts += [f"namespace {source}_ {{", text_of(f"{source}.cu"), *starts, "}"]
    return "\n".join(parts)


@cache
def library(form: str) -> ctypes.CDLL:
    """Load the kernels for a format. Compile them first if no process has yet done so for these sources."""
    text = translation_unit()
    folder = Path(tempfile.gettempdir(), f"shardlab-emulated-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{sha256(text.encode()).hexdigest()[:16]}-{form}.so"
    if not path.exists():
        assert COMPILER, "a C++ compiler is needed"
        with tempfile.TemporaryDirectory(dir=folder) as own:
            source, built = Path(own, "kernels.cpp"), Path(own, "kernels.so")
            source.write_text(text)
            subprocess.run([COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-D{form.upper()}", source, "-o",
                            built], check=True)
            built.replace(path)
    return ctypes.CDLL(str(path))


@cache
def compiled_function(kernel: str, form: str):
    """Return an emulated kernel, as launcher.function returns a compiled one."""
    _, name = kernel.split(".")
    start, sizes = (getattr(library(form), f"{what}_{name}") for what in ("start", "sizes"))
    out = (ctypes.c_int * 64)()
    expected = out[:sizes(out)]

    def run(grid, block, arguments):
        values = [by_value(x) for x in arguments]
        assert [x.nbytes for x in values] == expected, f"{kernel}: its arguments have other sizes"
        pointers = (ctypes.c_void_p * len(values))(*(x.ctypes.data for x in values))

        def begin(_=values):        # which pointers point at
            start(*grid, *block, *[1] * (2 - len(block)), pointers)

        begin()
        QUEUE.launch(begin)

    return run


def by_value(x) -> np.ndarray:
    """Return what CuPy passes for an argument: an array's address, a null pointer for None, a number, a struct."""
    if isinstance(x, SpyArray):
        return np.array(x.data.ptr, np.uint64)
    if x is None:
        return np.array(0, np.uint64)
    assert isinstance(x, (np.generic, np.ndarray)) and x.size == 1, f"a kernel takes no {type(x)}"
    return np.array(x)


# ---- cuBLAS ---------------------------------------------------------------------------------------------------------


class FakeCupy(ModuleType):
    """The parts of CuPy that our kernels and --log-throughput use."""

    class cuda:
        class runtime:
            CUDARuntimeError = type("CUDARuntimeError", (Exception,), {})

        class device:
            @staticmethod
            def get_device_id():
                return 0

        @staticmethod
        def Device():
            return SimpleNamespace(id=0)

        @staticmethod
        def get_current_stream():
            return SimpleNamespace(synchronize=QUEUE.finish, ptr=FakeCublas.STREAM + (QUEUE.recorded is not None))

        @staticmethod
        def Memory(size):
            return SimpleNamespace(ptr=size)

        class MemoryPool:
            malloc = None

        @staticmethod
        @contextmanager
        def using_allocator(malloc):
            yield

        class Stream:
            """A stream that records. Unlike a GPU's it computes meanwhile, but leaves nonsense behind."""

            def __init__(self, non_blocking):
                assert non_blocking, "what is recorded must not wait for the default stream"

            def __enter__(self):
                return self

            def __exit__(self, *_):
                assert QUEUE.recorded is None

            def synchronize(self):
                QUEUE.finish()

            def begin_capture(self):
                QUEUE.recorded = []

            def end_capture(self):
                calls, QUEUE.recorded = QUEUE.recorded, None
                for spy in leaves([call.args[0] for call in calls if getattr(call, "func", None) is compute_into]):
                    if spy.dtype.kind in "fV":
                        spy._elements.fill(np.nan)
                return SimpleNamespace(launch=lambda: [call() for call in calls])

    def __init__(self):
        super().__init__("cupy")

    def get_default_memory_pool(self):
        return SimpleNamespace(total_bytes=lambda: 10**6, free_all_blocks=lambda: None)


FORMATS = {1: np.dtype(np.float64), 0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}


class FakeCublas:
    """C = alpha op(A) op(B) + beta C, on matrices that lie column after column."""

    HANDLE, STREAM = 7, 5
    math_mode = 0
    calls = 0

    @staticmethod
    def cublasCreate_v2(handle):
        handle._obj.value = FakeCublas.HANDLE

    @staticmethod
    def cublasSetMathMode(handle, mode):
        assert handle.value == FakeCublas.HANDLE
        FakeCublas.math_mode = mode

    @staticmethod
    def cublasSetStream_v2(handle, stream):
        assert handle.value == FakeCublas.HANDLE and stream in (FakeCublas.STREAM, FakeCublas.STREAM + 1)

    @staticmethod
    def cublasSetWorkspace_v2(handle, address, size):
        assert handle.value == FakeCublas.HANDLE and address and size

    @staticmethod
    def cublasGemmEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc,
                     computeType, algo):
        FakeCublas.cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb,
                                              0, beta, C, Ctype, ldc, 0, 1, computeType, algo)

    @staticmethod
    def cublasGemmStridedBatchedEx(*arguments):
        assert len(arguments) == len(cublas.SIGNATURES["cublasGemmStridedBatchedEx"])
        FakeCublas.calls += 1
        FakeCublas.multiply(*arguments)
        QUEUE.launch(partial(FakeCublas.multiply, *arguments))

    @staticmethod
    def multiply(handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB,
                 beta, C, Ctype, ldc, strideC, batchCount, computeType, algo):
        wide = {68: np.dtype(np.float32), 70: np.dtype(np.float64)}[computeType]
        assert handle == FakeCublas.HANDLE and algo == -1
        assert FakeCublas.math_mode == 16, "cuBLAS may add up in the format of the result"
        assert Atype == Btype and FORMATS[Ctype] in (FORMATS[Atype], wide), "cuBLAS has no such product"
        assert (FORMATS[Atype] == np.float64) == (wide == np.float64)
        alpha, beta = (matrix(address, wide, 1, 1, 1)[0, 0] for address in (alpha, beta))
        for i in range(batchCount):
            a, b, c = (columns(address, FORMATS[form], i * stride, rows, width, ld, transposed)
                       for address, form, stride, rows, width, ld, transposed in (
                           (A, Atype, strideA, m, k, lda, transa), (B, Btype, strideB, k, n, ldb, transb),
                           (C, Ctype, strideC, m, n, ldc, 0)))
            product = alpha * (a.astype(wide) @ b.astype(wide))
            c[...] = (product if beta == 0 else product + beta * c.astype(wide)).astype(c.dtype)


def columns(address, dtype, offset, rows, width, ld, transposed):
    """Return op(X) [rows, width], where X is stored by columns, `ld` elements apart."""
    if transposed:
        return matrix(address + offset * dtype.itemsize, dtype, width, rows, ld).T
    return matrix(address + offset * dtype.itemsize, dtype, rows, width, ld)


def matrix(address, dtype, rows, width, ld):
    assert ld >= max(1, rows), "cuBLAS refuses columns that overlap"
    nbytes = (ld * (width - 1) + rows) * dtype.itemsize
    flat = np.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, width), (dtype.itemsize, ld * dtype.itemsize))
