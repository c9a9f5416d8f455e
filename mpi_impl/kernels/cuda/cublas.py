"""cuBLAS, by ctypes: the calls that gemm.py needs, and its codes.

CuPy has functions for them, which refuse while a graph is recorded (recording.py).
"""
import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.runtime.arrays import dtype_of

PLAIN, TRANSPOSED = 0, 1      # what to do with a factor
DEFAULT = -1                  # cuBLAS's choice of an algorithm
# Where parts of a sum are added up at the end, this adds them in float32, too, and not in the format of the result:
SUMS_IN_NUMBERS = 16          # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
FORMATS = {dtype_of(name): code for name, code in (("float64", 1), ("float32", 0), ("float16", 2), ("bfloat16", 14))}
COMPUTE = {np.dtype(np.float64): 70, np.dtype(np.float32): 68}

WORKSPACE = 32 << 20          # bytes that its kernels may use meanwhile: as many as it takes by itself on a Hopper

POINTER, INT, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
MATRIX = [POINTER, INT, INT]                                        # its address, its format, and its step
SIZES = [POINTER, INT, INT, INT, INT, INT, POINTER]                 # from the handle to alpha
SIGNATURES = {
    "cublasCreate_v2": [POINTER], "cublasSetMathMode": [POINTER, INT], "cublasSetStream_v2": [POINTER, POINTER],
    "cublasSetWorkspace_v2": [POINTER, POINTER, ctypes.c_size_t],
    "cublasGemmEx": [*SIZES, *MATRIX, *MATRIX, POINTER, *MATRIX, INT, INT],
    "cublasGemmStridedBatchedEx": [*SIZES, *MATRIX, LONG, *MATRIX, LONG, POINTER, *MATRIX, LONG, INT, INT, INT]}


@cache
def library():
    """Return the cuBLAS that CuPy is linked with: its functions are found by way of CuPy's module."""
    from cupy_backends.cuda.libs import cublas
    found = ctypes.CDLL(cublas.__file__)
    for name, arguments in SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.errcheck = arguments, check
    return found


def check(status: int, function, _) -> int:
    """Raise RuntimeError for a status that is not success."""
    if status:
        raise RuntimeError(f"cuBLAS's {function.__name__} has failed with status {status}")
    return status


class Handle(NamedTuple):
    """The address of a cuBLAS handle, and the handle's workspace, which must live as long."""

    address: int
    workspace: Any


@cache
def handle(device: int, stream: int) -> Handle:
    """Make this rank's handle for a stream of a GPU, which is the current one. Each has a workspace that lasts: what is
    recorded will use it again.
    """
    from cupy.cuda import Memory
    made, workspace = POINTER(), Memory(WORKSPACE)
    library().cublasCreate_v2(ctypes.byref(made))
    assert made.value
    library().cublasSetStream_v2(made, stream)
    library().cublasSetWorkspace_v2(made, workspace.ptr, WORKSPACE)      # after the stream, which resets it
    library().cublasSetMathMode(made, SUMS_IN_NUMBERS)
    return Handle(made.value, workspace)


@cache
def whereabouts():
    """Return CuPy's functions that tell the current GPU's number, and the current stream."""
    from cupy.cuda import get_current_stream
    from cupy.cuda.device import get_device_id
    return get_device_id, get_current_stream


def here() -> int:
    """Return the address of the handle whose work goes to the current stream of the current GPU."""
    device, stream = whereabouts()
    return handle(device(), stream().ptr).address
