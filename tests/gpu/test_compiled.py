"""Every CUDA source compiles for the GPUs of 2020 (Ampere, sm_80) and 2022 (Hopper, sm_90), which needs no GPU.

The options are ours and the two that CuPy 14 adds to those of every RawModule.
"""
import importlib.util
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mpi_impl.kernels.fused import launcher
from tests.gpu import emulated

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
resources = import_module("registers").resources

pytestmark = pytest.mark.deep
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None,
    reason="needs NVIDIA's compiler: pip install '.[nvrtc]'")
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
def test_no_kernel_spills(source, form):
    """And a processor's 65,536 registers are enough for the largest block."""
    found = resources(source, form)
    assert set(found) == {name for its_source, name in emulated.kernels() if its_source == source}
    for name, (registers, spilled, _) in found.items():
        assert spilled == 0 and registers <= 65_536 // (1024 if name in LARGE else launcher.THREADS), name
