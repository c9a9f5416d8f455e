"""Starts the kernels of the .cu files beside this one: each is compiled by CuPy when it is first needed."""
from functools import cache
from math import prod
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
SOURCES = sorted(path.stem for path in FOLDER.glob("*.cu"))
FORMATS = ("float64", "float32", "float16", "bfloat16")
THREADS = 256       # of a block: warps of 32, at most 32 of them
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


def launch(kernel: str, dtype, blocks: int, *arguments) -> None:
    """Start a kernel, "file.name", compiled for a dtype, on the current stream.

    Arguments are contiguous arrays on the device, None for a null pointer, and numbers: int and bool are the kernel's
    int, float is its double, and NumPy's are what they are.
    """
    assert all(x.flags.c_contiguous for x in arguments if hasattr(x, "flags")), f"{kernel}: an array with gaps"
    if blocks > 0:
        function(kernel, str(np.dtype(dtype)))((blocks,), (THREADS,), tuple(map(as_argument, arguments)))


def as_argument(x):
    """CuPy would make int 64 bits long."""
    return np.int32(x) if isinstance(x, int) else np.float64(x) if isinstance(x, float) else x


def packed(width: int, *arrays) -> bool:
    """Whether rows of these arrays can be read and written 16 bytes at a time."""
    there = [x for x in arrays if x is not None]
    return width * there[0].itemsize % 16 == 0 and all(x.data.ptr % 16 == 0 for x in there)


def site_of(site, shape) -> np.ndarray:
    """What a kernel wants to know of a Site (reference/dropout.py) for an array [b, s, h] or [b, a, s, s]; None: it
    drops nothing.
    """
    second, third = (1, *shape[1:-1])[-2:]
    told = np.zeros(1, SITE)
    if site is None:
        told[0] = (0, (0, 0, 0), (0, 0), 0, second, third, 0, 1.0)
        return told
    steps = [prod(site.whole[axis + 1:]) for axis in range(len(shape))]
    along = (steps[0], *((0, steps[1]) if len(shape) == 3 else steps[1:3]))
    first = sum(start * step for start, step in zip(site.first, steps)) % 2**64
    told[0] = (first, along, site.key, site.threshold, second, third, 1, site.scale)
    return told
