"""The launcher of the kernels in the .cu files: on a GPU or on a core, wherever their arrays are.

For a GPU, CuPy compiles them when they are first needed; for a core, core.py does.
"""
from functools import cache
from pathlib import Path

import numpy as np

from mpi_impl.kernels.fused import core
from mpi_impl.runtime.arrays import address, counter_of, dtype_of, on_device

FOLDER = Path(__file__).parent
SOURCES = sorted(path.stem for path in FOLDER.glob("*.cu"))
FORMATS = ("float64", "float32", "float16", "bfloat16")
WARP = 32           # threads that add up without waiting for others
THREADS = 256       # of a block on a GPU: at most 32 warps
NAMES = {dtype_of(name): name for name in FORMATS}


def source(name: str) -> str:
    """Read a source file, with the part that all share before it."""
    return "\n".join((FOLDER / file).read_text() for file in ("common.cuh", f"{name}.cu"))


def options(form: str) -> tuple[str, ...]:
    """Return the compiler's options for arrays of this format."""
    return "-std=c++17", f"-D{form.upper()}"


@cache
def module(name: str, form: str):
    import cupy
    return cupy.RawModule(code=source(name), options=options(form))


@cache
def function(kernel: str, form: str):
    """Return a kernel, "file.name", for a format."""
    name, _, entry = kernel.partition(".")
    return module(name, form).get_function(entry)


def launch(kernel: str, dtype, blocks: int, first, *others, threads: tuple[int, ...] | None = None) -> None:
    """Start a kernel, "file.name", compiled for a dtype: on the current stream of the GPU, or on this core. A block has
    THREADS threads there, unless it shall have others, perhaps in rows.

    Arguments are contiguous arrays, the first of which decides where; None for a null pointer; structs (structs.py);
    and numbers: int and bool are the kernel's int, float is its double, and np.uint64 its Index. On arrays without data
    nothing is started: their bytes are counted.
    """
    arguments, form = (first, *others), NAMES[dtype]
    if blocks == 0:
        return
    if isinstance(first, np.ndarray):
        core.function(kernel.partition(".")[2], form)(blocks, *map(core.as_argument, arguments))
    elif (counter := counter_of(first)):
        counter.stream(sum(x.nbytes for x in arguments if counter_of(x)))
    else:
        function(kernel, form)((blocks,), threads or (THREADS,), tuple(map(as_argument, arguments)))


def call(kernel: str, blocks: int, first, *others) -> None:
    """Call a kernel for cores alone, "file.name", on arrays that may have gaps; else as `launch`."""
    core.function(kernel.partition(".")[2], NAMES[first.dtype])(blocks, *map(place_of, (first, *others)))


def place_of(x):
    return address(x) if isinstance(x, np.ndarray) and not x.dtype.names else core.as_argument(x)


def as_argument(x):
    """Convert numbers to the kernel's types: CuPy would make int 64 bits long."""
    assert not hasattr(x, "flags") or x.flags.c_contiguous, f"an array of shape {x.shape} with gaps"
    return np.int32(x) if isinstance(x, int) else np.float64(x) if isinstance(x, float) else x


def blocks_for(x, most: int) -> int:
    """Return how many blocks share the elements of a flat array: on a core, one takes all."""
    return min(-(-x.size // THREADS), most) if on_device(x) else 1


def threads_for(x, width: int, is_packed: bool) -> tuple[int, int]:
    """Return how many threads have one pack of a row each, if a block can have that many; and the rows of a block, more
    than one if these are so short that a warp is enough. On a core each block has one row.
    """
    if not on_device(x):
        return 1, 1
    packs = packs_of(x, width, is_packed)
    if packs > WARP:
        return min(-(-packs // THREADS) * THREADS, 1024), 1
    return (lanes := 1 << (packs - 1).bit_length()), THREADS // lanes


def blocks_across(x, width: int, is_packed: bool) -> int:
    """Return how many blocks have one pack of a row for each of their threads."""
    return -(-packs_of(x, width, is_packed) // THREADS)


def packs_of(x, width: int, is_packed: bool) -> int:
    """Return the number of packs, of 16 bytes or of one element, in a row of an array like x."""
    return width * x.itemsize // 16 if is_packed else width


def packed(width: int, *arrays) -> bool:
    """Report whether a GPU can read and write rows of these arrays 16 bytes at a time."""
    return on_device(arrays[0]) and width * arrays[0].itemsize % 16 == 0 and all(
        x is None or x.data.ptr % 16 == 0 for x in arrays)
