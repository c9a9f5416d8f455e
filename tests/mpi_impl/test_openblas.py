"""Products are left to the kernels of OpenBLAS that are fastest on this processor."""

import pytest

from mpi_impl.runtime import openblas
from mpi_impl.runtime.openblas import kernel_settings

PROCESSOR = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: 17\nflags\t\t: fpu sse avx2 {} sha_ni\n"
ZEN_3, ZEN_4 = (PROCESSOR.format("AuthenticAMD", 25, more) for more in ("", "avx512f"))
ZEN_5, INTEL = PROCESSOR.format("AuthenticAMD", 26, "avx512f"), PROCESSOR.format("GenuineIntel", 25, "avx512f")
AVX2 = {"OPENBLAS_CORETYPE": "HASWELL"}
CONFIG = '"blas": {{\n "name": "{}",\n "found": bool("True"),\n "version": "{}",\n}},\n"lapack": {{"version": "0.3.1"}}'
WHEEL = CONFIG.format("scipy-openblas", "0.3.31.188.0")


@pytest.mark.parametrize("processor, config, chosen", [
    (ZEN_4, WHEEL, AVX2), (ZEN_3, WHEEL, {}), (ZEN_5, WHEEL, {}), (INTEL, WHEEL, {}), ("", WHEEL, {}),
    (ZEN_4, "", {}), (ZEN_4, CONFIG.format("scipy-openblas", "0.3.34"), {})])
def test_only_an_older_openblas_on_a_zen_4_needs_to_be_told(monkeypatch, processor, config, chosen):
    monkeypatch.setattr(openblas, "first_processor", lambda: processor)
    monkeypatch.setattr(openblas, "numpy_config", lambda: config)
    assert kernel_settings() == chosen
