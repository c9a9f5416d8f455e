"""Products are left to the kernels of OpenBLAS that are fastest on this processor."""
import os

import numpy as np
import pytest

from mpi_impl.runtime import openblas
from mpi_impl.runtime.openblas import IN_NUMPY, kernel_settings, numpy_config
from tests.launching import command, launch, write_program

PROCESSOR = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: 17\nflags\t\t: fpu sse avx2 {} sha_ni\n"
ZEN_3, ZEN_4 = (PROCESSOR.format("AuthenticAMD", 25, more) for more in ("", "avx512f"))
ZEN_5, INTEL = PROCESSOR.format("AuthenticAMD", 26, "avx512f"), PROCESSOR.format("GenuineIntel", 25, "avx512f")
AVX2 = {"OPENBLAS_CORETYPE": "HASWELL"}
CONFIG = '"blas": {{\n "name": "{}",\n "found": bool("True"),\n "version": "{}",\n}},\n"lapack": {{"version": "0.3.1"}}'
WHEEL = CONFIG.format("scipy-openblas", "0.3.31.188.0")
CORE_TYPE = "print(os.environ.get('OPENBLAS_CORETYPE'))"


@pytest.mark.parametrize("processor, config, chosen", [
    (ZEN_4, WHEEL, AVX2), (ZEN_4, CONFIG.format("scipy-openblas", "0.3.33"), AVX2), (ZEN_3, WHEEL, {}),
    (ZEN_5, WHEEL, {}), (INTEL, WHEEL, {}), ("", WHEEL, {}), (ZEN_4, CONFIG.format("blas", "0.3.9"), {}),
    (ZEN_4, "", {}), (ZEN_4, CONFIG.format("scipy-openblas", "0.3.34"), {}),
    (ZEN_4, CONFIG.format("scipy-openblas", "1.0.0"), {})])
def test_only_an_older_openblas_on_a_zen_4_needs_to_be_told(monkeypatch, processor, config, chosen):
    monkeypatch.setattr(openblas, "first_processor", lambda: processor)
    monkeypatch.setattr(openblas, "numpy_config", lambda: config)
    assert kernel_settings() == chosen


def test_ranks_are_told_unless_the_user_has_chosen(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    program = write_program(tmp_path, CORE_TYPE)
    assert launch(2, program).stdout == f"{kernel_settings().get('OPENBLAS_CORETYPE')}\n" * 2
    assert launch(2, program, env={"OPENBLAS_CORETYPE": "ZEN"}).stdout == "ZEN\n" * 2


@pytest.mark.skipif(not IN_NUMPY.search(numpy_config()) or "avx2" not in openblas.first_processor(),
                    reason="another BLAS, or a processor without AVX2")
def test_openblas_knows_the_name(tmp_path):
    """An unknown one would be ignored, with a line on stderr."""
    folder = os.path.join(os.path.dirname(np.__file__), "..", "numpy.libs")
    library = next(os.path.join(folder, name) for name in os.listdir(folder) if "openblas" in name)
    program = tmp_path / "core.py"
    program.write_text("import ctypes, sys\nname = ctypes.CDLL(sys.argv[1]).scipy_openblas_get_corename64_\n"
                       "name.restype = ctypes.c_char_p\nprint(name().decode())")
    done = command(str(program), library, env={"OPENBLAS_CORETYPE": "HASWELL"})
    assert (done.stdout, done.stderr) == ("Haswell\n", "")
