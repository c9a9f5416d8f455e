"""Registers, spilled bytes and shared memory of our CUDA kernels, as NVIDIA's compiler gives them without a GPU.

    .venv/bin/python benchmarks/registers.py        # with nvcc, of any CUDA from 12.0 on, and a C++ compiler

They are compiled for Hopper (sm_90) with CuPy's options. A processor of a GPU has 65,536 registers, so a kernel whose
blocks may have 1,024 threads must not take more than 64.
"""
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from programs import head, parse, parser_of, row

from mpi_impl.kernels.fused import launcher
from mpi_impl.launch.entry import run_alone
from reference.errors import UserError

KERNEL = re.compile(r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads\n"
                    r"[^\n]*Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?", re.DOTALL)


class Resources(NamedTuple):
    """The resources of a thread, and the shared memory of a block."""

    registers: int
    spilled: int        # bytes
    shared: int         # bytes


def resources(source: str, form: str) -> dict[str, Resources]:
    """Compile a source for arrays of this format -> by kernel. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{source}.cu")
        path.write_text(launcher.source(source))
        command = ["nvcc", "-cubin", "-arch=sm_90", *launcher.options(form), "-ftz=true", "-Xptxas", "-v", path.name]
        try:
            said = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stderr
        except FileNotFoundError:
            raise UserError("nvcc is not installed, or not on PATH. It comes with CUDA's toolkit.") from None
    return {name: Resources(int(registers), int(stores) + int(loads), int(shared or 0))
            for name, stores, loads, registers, shared in KERNEL.findall(said)}


def main(argv: Sequence[str] | None = None) -> None:
    parse(parser_of("registers", __doc__), argv)
    print(head("kernel", *(f"{form}: registers, spilled, shared" for form in ("bfloat16", "float32"))), flush=True)
    for source in launcher.SOURCES:
        found = [resources(source, form) for form in ("bfloat16", "float32")]
        for name in found[0]:
            print(row(f"{source}.{name}", *(", ".join(map(str, one[name])) for one in found)), flush=True)


if __name__ == "__main__":
    run_alone(main)
