"""Starts the kernels of the .cu files beside this one, on a GPU or on a core: where their arrays are.

For a GPU, CuPy compiles them when they are first needed; for a core, core.py does.
"""
from functools import cache
from math import prod
from pathlib import Path

import numpy as np

from mpi_impl.kernels.fused import core
from mpi_impl.runtime.arrays import dtype_of, on_device

FOLDER = Path(__file__).parent
SOURCES = sorted(path.stem for path in FOLDER.glob("*.cu"))
FORMATS = ("float64", "float32", "float16", "bfloat16")
THREADS = 256       # of a block on a GPU: warps of 32, at most 32 of them
NAMES = {dtype_of(name): name for name in FORMATS}
SITE = np.dtype([("first", "u8"), ("along", "u8", 3), ("key", "u4", 2), ("threshold", "u4"), ("second", "u4"),
                 ("third", "u4"), ("dropping", "u4"), ("scale", "f8")])      # common.cuh's struct Site


def source(name: str) -> str:
    """All of a source file, with what it shares with the others."""
    return "\n".join((FOLDER / file).read_text() for file in ("common.cuh", f"{name}.cu"))


def options(form: str) -> tuple[str, ...]:
    """The compiler's, for arrays of this format."""
    return "-std=c++17", f"-D{form.upper()}"


@cache
def module(name: str, form: str):
    import cupy
    return cupy.RawModule(code=source(name), options=options(form))


@cache
def function(kernel: str, form: str):
    """A kernel, "file.name", for a format."""
    name, _, entry = kernel.partition(".")
    return module(name, form).get_function(entry)


def launch(kernel: str, dtype, blocks: int, first, *others) -> None:
    """Start a kernel, "file.name", compiled for a dtype: on the current stream of the GPU, or now and here.

    Arguments are contiguous arrays, the first of which says where; None for a null pointer; structs (arrays of one
    element); and numbers: int and bool are the kernel's int, float is its double, and np.uint64 its Index.
    """
    arguments, form = (first, *others), NAMES[dtype]
    if blocks == 0:
        return
    assert all(x.flags.c_contiguous for x in arguments if hasattr(x, "flags")), f"{kernel}: an array with gaps"
    if on_device(first):
        function(kernel, form)((blocks,), (THREADS,), tuple(map(as_argument, arguments)))
    else:
        core.function(kernel.partition(".")[2], form)(blocks, *map(core.as_argument, arguments))


def as_argument(x):
    """CuPy would make int 64 bits long."""
    return np.int32(x) if isinstance(x, int) else np.float64(x) if isinstance(x, float) else x


def blocks_for(x, most: int) -> int:
    """Into how many blocks the elements of a flat array are cut: on a core, none takes another's time."""
    return min(-(-x.size // THREADS), most) if on_device(x) else 1


def packed(width: int, *arrays) -> bool:
    """Whether a GPU can read and write rows of these arrays 16 bytes at a time."""
    there = [x for x in arrays if x is not None]
    return on_device(there[0]) and width * there[0].itemsize % 16 == 0 and all(x.data.ptr % 16 == 0 for x in there)


def site_of(site, shape) -> np.ndarray:
    """What a kernel wants to know of a Site (reference/dropout.py) for an array of up to four dimensions, as [b, s, h]
    or [b, a, s, s]; None: it drops nothing.
    """
    if site is None:
        return NO_SITE
    steps = [prod(site.whole[axis + 1:]) for axis in range(len(shape))]
    first = sum(start * step for start, step in zip(site.first, steps)) % 2**64
    along, (second, third) = (0, 0, *steps[:-1])[-3:], (1, 1, *shape[:-1])[-2:]
    return np.array([(first, along, site.key, site.threshold, second, third, 1, site.scale)], SITE)


NO_SITE = np.array([(0, (0, 0, 0), (0, 0), 0, 1, 1, 0, 1.0)], SITE)
