"""The kernels for one core of a CPU, compiled once on each machine: the same sources as plain C++ (core.h), and
the .cpp files, which are for cores alone. Those in the folders floats and halves are for arrays of such formats.

Without a C++ compiler, or a writable folder for its output, only time is lost: kernels/cpu.py does the same in NumPy.
"""
import ctypes
import fcntl
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mpi_impl.kernels.fused.structs import HEADS, ROWS, RUNS, SITE, Product
from mpi_impl.runtime.arrays import dtype_of
from mpi_impl.runtime.files import read_bytes, read_text
from reference.errors import UserError

FOLDER = Path(__file__).parent
HALVES = "float16", "bfloat16"
SEAL = ".xxh128"                        # the ending of the file with a library's checksum
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-shared",
           "-fPIC", "-w")
KERNEL = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)')


@cache
def compiler() -> str:
    """Find the C++ compiler of this machine, or ""."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")


@cache
def works(form: str = "float32") -> bool:
    """Report whether kernels for a format work on this machine, and compile them if that has not been done yet."""
    try:
        return bool(compiler()) and bool(library(form))
    except (OSError, RuntimeError, subprocess.SubprocessError):     # no home is a RuntimeError
        return False


@cache
def library(form: str) -> ctypes.CDLL:
    """Load all kernels for a format. Ranks that need them at the same time wait for the first one to compile them.

    What is loaded runs, and a damaged library ends the process: so it is only loaded if it is this user's, and whole.
    Raises OSError or SubprocessError.
    """
    text = translation_unit(form)
    made_for = (text, OPTIONS, form, compiler(), platform.node(), platform.machine(), instructions())
    path = folder() / f"{sha256(repr(made_for).encode()).hexdigest()[:20]}.so"
    if not is_own(path.parent):     # others can change what is there: so these kernels are for this process alone
        with tempfile.TemporaryDirectory() as own:
            return ctypes.CDLL(str(compile_kernels(text, form, own)))
    if not is_whole(path):
        with one_process(path.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=path.parent) as own:
            if not is_whole(path):
                made, seal = compile_kernels(text, form, own), Path(own, "seal")
                seal.write_text(digest(made))
                made.replace(path)
                seal.replace(path.with_suffix(SEAL))
    return ctypes.CDLL(str(path))


def compile_kernels(text: str, form: str, own: str) -> Path:
    """Compile the kernels for a format in an empty folder, and return the library."""
    made = Path(own, "kernels.so")
    Path(own, "kernels.cpp").write_text(text)
    subprocess.run([compiler(), *OPTIONS, f"-D{form.upper()}", "kernels.cpp", "-o", made.name], cwd=own, check=True,
                   stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)
    made.chmod(0o700)
    return made


def is_own(path: Path) -> bool:
    """Report whether only this user can have written it."""
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_whole(path: Path) -> bool:
    """Report whether the library is there, and as it was when it was compiled."""
    try:
        return is_own(path) and digest(path) == read_text(str(path.with_suffix(SEAL)), 32)
    except (FileNotFoundError, UserError):
        return False


def digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(read_bytes(str(path)))


@contextmanager
def one_process(path: Path) -> Iterator[None]:
    """Let one process at a time do what is inside the `with` block."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)     # which does not wait, even if it is a pipe
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def instructions() -> str:
    """Return this processor's instruction sets: an image of a machine may start on another one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())


def folder() -> Path:
    """Make the folder in which this user's compiled kernels are kept. Raises OSError."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "shardlab", "kernels")
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


# ---- sources --------------------------------------------------------------------------------------------------------


def sources(form: str) -> list[Path]:
    """Return the files with kernels: those for GPUs, too, and then those for cores alone, which call them."""
    return [*sorted(FOLDER.glob("*.cu")), *sorted(FOLDER.glob("*.cpp")), *sorted(own_folder(form).glob("*.cpp"))]


def own_folder(form: str) -> Path:
    return FOLDER / ("halves" if form in HALVES else "floats")


def translation_unit(form: str) -> str:
    """Join all sources, each in a namespace of its own, with a function for each kernel that loops over the blocks."""
    headers = FOLDER / "core.h", FOLDER / "common.cuh", own_folder(form) / "products.h"
    parts = [text_of(path) for path in headers]
    for path in sources(form):
        text = without_gpu_code(text_of(path))
        parts += [f"namespace {path.stem}_ {{", text.replace('extern "C" ', ""),
                  *(loop(name, parameters) for name, parameters in KERNEL.findall(text)), "}"]
    return "\n".join(parts)


def loop(name: str, parameters: str) -> str:
    names = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
    return (f'extern "C" void core_{name}(int blocks, {parameters}) {{\n'
            "    gridDim.x = blocks;\n"
            f"    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {name}({names});\n}}")


def without_gpu_code(text: str) -> str:
    """Remove what is for GPUs alone."""
    return re.sub(r"#if !defined\(CORE\).*?#endif", "", text, flags=re.DOTALL)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# ---- calls ----------------------------------------------------------------------------------------------------------

STRUCTS = {dtype: np.ctypeslib.as_ctypes_type(dtype) for dtype in (SITE, ROWS, HEADS, RUNS)}
TYPES = {"Site": STRUCTS[SITE], "Rows": STRUCTS[ROWS], "Heads": STRUCTS[HEADS], "Runs": STRUCTS[RUNS],
         "Product": Product, "int": ctypes.c_int, "double": ctypes.c_double, "Index": ctypes.c_uint64}
BFLOAT16 = dtype_of("bfloat16")        # of which Python has no buffers
BYTE: Any = ctypes.c_char       # its declared type takes no arrays


@cache
def function(name: str, form: str) -> Callable:
    """Return a kernel for arrays of a format, as a function of the number of blocks and its arguments."""
    found = getattr(library(form), f"core_{name}")
    found.argtypes = [ctypes.c_int, *parameter_types(name, form)]
    found.restype = None
    return found


def parameter_types(name: str, form: str) -> list:
    parameters = next(parameters for path in sources(form)
                      for its_name, parameters in KERNEL.findall(text_of(path)) if its_name == name)
    return [ctypes.c_void_p if "*" in one else TYPES[one.split()[0]] for one in parameters.split(",")]


def as_argument(x):
    """Convert an array without gaps to its address, a struct to ctypes's; leave a number as it is.

    Each kernel takes up to ten arrays, and ctypes finds an address in less than half of NumPy's time.
    """
    if not isinstance(x, np.ndarray):
        return int(x) if isinstance(x, np.integer) else x
    if x.dtype.names:
        return STRUCTS[x.dtype].from_buffer_copy(x)
    assert x.flags.c_contiguous, f"an array of shape {x.shape} with gaps"
    if not (x.flags.writeable and x.size):
        return x.ctypes.data
    return ctypes.addressof(BYTE.from_buffer(x.view(np.uint16) if x.dtype == BFLOAT16 else x))
