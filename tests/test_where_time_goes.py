"""The profile of a step in benchmarks/: nothing of a step's time is counted twice, and no product is missed."""
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mpi_impl.kernels.fused import core

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
where_time_goes, works = map(import_module, ("where_time_goes", "works"))
WORK = works.Work(h=32, L=2, a=2, s=8, b=5, V=256)

pytestmark = [pytest.mark.deep, pytest.mark.skipif(not core.works() or sys.platform != "linux",
                                                   reason="needs a C++ compiler, and Linux")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rows_make_up_the_step_and_the_products_its_flops(tmp_path, ranks):
    """Every weight takes part in three products with all tokens, of matrices with b s rows or columns."""
    times = where_time_goes.where(WORK, ranks, where_time_goes.compile_clock(tmp_path / "clock.so"))
    found = where_time_goes.by_kind(times)
    assert sum(found.values()) == pytest.approx(times["step"])
    assert found["no core"] > -0.02 * times["step"]
    shaped = sum(ms for *_, ms, _ in times["products"])
    assert found["matrix products"] == pytest.approx(shaped, rel=1e-6)
    assert (found["messages"] > 0) == (found["waiting for other ranks"] > 0) == (ranks > 1)
    weights = 12 * WORK.L * WORK.h**2 + WORK.V * WORK.h
    flops = sum(2 * m * k * n * calls for m, k, n, _, calls in times["products"] if WORK.tokens in (m, k, n) and n > 1)
    assert flops * ranks == 6 * WORK.tokens * weights
    calls = {name: calls for kind, name, _, calls in times["rows"] if kind == "our kernels"}
    assert calls["attention_core"] == calls["attention_core_backward"] == calls["activated_linear"] == WORK.L
