"""The papers' tables, as the walkthroughs have them, hold together."""
import pytest

from reference.costs.parameters import parameters
from reference.costs.published import A100_PEAK, MEGATRON, PTD_P, STRONG_SCALING
from tests.reference.test_cost import PTD_P as TESTED


def test_table_1_of_ptd_p_is_the_one_that_the_formulas_are_tested_with():
    assert [tuple(map(str, run)) for run in PTD_P] == [tuple(map(str, row[:10])) for row in TESTED]


@pytest.mark.parametrize("run", PTD_P, ids=lambda run: run.billions)
def test_a_run_of_ptd_p(run):
    """Its size is printed so, its ranks multiply, its batch divides, and it reaches the share of the peak."""
    assert f"{parameters(run.model) / 1e9:.1f}" == run.billions
    assert run.parallel.world_size == run.gpus and run.B % run.parallel.data_parallel_size == 0
    assert f"{run.teraflops * 1e12 / A100_PEAK:.0%}" == f"{run.of_peak}%"


def test_megatrons_models():
    """Heads of 96, and sizes as printed (Shoeybi et al. 2019, table 1)."""
    assert all(f"{parameters(one.model) / 1e9:.1f}" == one.billions and one.model.head_size == 96 for one in MEGATRON)
    assert [one.t for one in MEGATRON] == list(STRONG_SCALING)
