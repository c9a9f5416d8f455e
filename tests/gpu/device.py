"""The device of this folder's tests: the GPUs of this machine with `--cuda`, else an emulation."""
import os
from contextlib import contextmanager

import pytest

from tests.gpu import emulated
from tests.spy import SpyArray

CUDA = "SHARDLAB_TEST_CUDA"                 # in the environment, so that ranks know it, too
REAL = os.environ.get(CUDA) == "1"          # (conftest.py)
LIMIT = 80.0 if REAL else 30.0              # seconds of a run on ranks: CuPy compiles each of its kernels on first use
needs_somewhere = pytest.mark.skipif(not REAL and emulated.COMPILER is None,
                                     reason="no C++ compiler, to emulate a GPU with")
needs_a_gpu = pytest.mark.skipif(not REAL, reason="needs a GPU: ./run.sh test-cuda")


@contextmanager
def gpu(rank: int = 0):
    """Give device arrays kernels; yield the function that copies an array to the device.

    A rank takes the GPU of its number. Where there are more ranks than GPUs, they share them.
    """
    if REAL:
        import cupy
        cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
        yield put
    else:
        with emulated.gpu():
            yield put


def put(x):
    """Return a copy of a host array on the device; None for None."""
    if x is None:
        return None
    if REAL:
        import cupy
        return cupy.asarray(x)
    return SpyArray(x)
