"""The choice of OpenBLAS's kernels, which compute the products, before NumPy loads it. Standard library only.

OpenBLAS has kernels for each processor, and takes those for AVX-512 wherever it finds AVX-512. AMD's Zen 4 executes
each 512-bit instruction in two halves: the kernels for AVX2, which OpenBLAS names after Intel's Haswell, are 5 to 8 %
faster on it. OpenBLAS 0.3.34 is the first with block sizes for Zen 4: they suit its kernels for AVX-512, and those for
AVX2 would overflow the stack with them (OpenBLAS's issues 6013 and 6021).
"""
import contextlib
import re
from importlib.util import find_spec
from pathlib import Path

ZEN_4 = ("vendor_id\t: AuthenticAMD\n", "cpu family\t: 25\n", " avx512f ")      # Zen 3, of this family, has no AVX-512
IN_NUMPY = re.compile(r'"name": "scipy-openblas",[^}]*?"version": "(\d+)\.(\d+)\.(\d+)')    # the one in its wheels
KNOWS_ZEN_4 = (0, 3, 34)


def kernel_settings() -> dict[str, str]:
    """Return the variable that makes OpenBLAS take other kernels than its own choice, or none."""
    with contextlib.suppress(OSError):      # another system, or a NumPy without this file
        if is_zen_4(first_processor()) and is_older(numpy_config()):
            return {"OPENBLAS_CORETYPE": "HASWELL"}
    return {}


def is_zen_4(processor: str) -> bool:
    return all(text in processor for text in ZEN_4)


def is_older(config: str) -> bool:
    """Report whether NumPy has brought its own OpenBLAS, from before the version that knows Zen 4."""
    found = IN_NUMPY.search(config)
    return found is not None and tuple(map(int, found.groups())) < KNOWS_ZEN_4


def first_processor() -> str:
    """Return what Linux says about the first processor. Raises OSError."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return file.read(4000).partition("\n\n")[0]


def numpy_config() -> str:
    """Read how NumPy was built, without importing it. Raises OSError."""
    found = find_spec("numpy")
    return Path(found.origin).with_name("__config__.py").read_text(encoding="utf-8") if found and found.origin else ""
