"""Every CUDA source compiles for the GPUs of 2020 (Ampere, sm_80) and 2022 (Hopper, sm_90), which needs no GPU.

The options are ours and the two that CuPy 14 adds to those of every RawModule.
"""
import importlib.util

import pytest

from mpi_impl.kernels.fused import launcher

pytestmark = [pytest.mark.deep, pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None,
    reason="needs NVIDIA's compiler: pip install '.[nvrtc]'")]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("form", launcher.FORMATS)
@pytest.mark.parametrize("source", launcher.SOURCES)
def test_compiles(source, form, architecture):
    from cuda.core import Program, ProgramOptions
    standard, define = launcher.options(form)
    options = ProgramOptions(arch=architecture, std=standard.removeprefix("-std="),
                             define_macro=define.removeprefix("-D"), ftz=True, device_as_default_execution_space=True)
    assert Program(launcher.source(source), "c++", options).compile("cubin").code.startswith(b"\x7fELF")
