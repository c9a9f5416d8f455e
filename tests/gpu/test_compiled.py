"""Every CUDA source compiles for the GPUs of 2020 (Ampere, sm_80) and 2022 (Hopper, sm_90), which needs no GPU.

The options are ours and the two that CuPy 14 adds to those of every RawModule.
"""
import importlib.util
import re
import shutil
import subprocess

import pytest

from mpi_impl.kernels.fused import launcher
from tests.gpu import emulated

pytestmark = pytest.mark.deep
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None,
    reason="needs NVIDIA's compiler: pip install '.[nvrtc]'")
# The compiler's report of a kernel: spilled bytes, stored and loaded, and a thread's registers.
KERNEL = re.compile(r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads\n[^\n]*"
                    r"Used (\d+) registers", re.DOTALL)
LARGE = {"layer_norm_backward", "rms_norm_backward", "add_and_norm", "rms_norm"}    # blocks of up to 1,024 threads


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("form", launcher.FORMATS)
@pytest.mark.parametrize("source", launcher.SOURCES)
def test_compiles(source, form, architecture):
    from cuda.core import Program, ProgramOptions
    standard, define = launcher.options(form)
    options = ProgramOptions(arch=architecture, std=standard.removeprefix("-std="),
                             define_macro=define.removeprefix("-D"), ftz=True, device_as_default_execution_space=True)
    assert Program(launcher.source(source), "c++", options).compile("cubin").code.startswith(b"\x7fELF")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's toolkit: nvcc")
@pytest.mark.parametrize("form", launcher.FORMATS)
@pytest.mark.parametrize("source", launcher.SOURCES)
def test_no_kernel_spills(source, form, tmp_path):
    """And a processor's 65,536 registers are enough for the largest block."""
    (tmp_path / "kernels.cu").write_text(launcher.source(source))
    command = ["nvcc", "-cubin", "-arch=sm_90", *launcher.options(form), "-ftz=true", "-Xptxas", "-v", "kernels.cu"]
    report = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stderr
    kernels = KERNEL.findall(report)
    assert {name for name, *_ in kernels} == {name for its_source, name in emulated.kernels() if its_source == source}
    for name, *counts in kernels:
        stored, loaded, registers = map(int, counts)
        assert stored == loaded == 0 and registers <= 65_536 // (1024 if name in LARGE else launcher.THREADS), name
