"""The papers' tables, as the walkthroughs have them, hold together."""
import pytest

from reference.costs.flops import utilization
from reference.costs.parameters import parameters, published_parameters
from reference.costs.published import A100_PEAK, MEGATRON, PTD_P, STRONG_SCALING


@pytest.mark.parametrize("run", PTD_P, ids=lambda run: run.billions)
def test_a_run_of_ptd_p(run):
    """Each row of the table has the printed size and share of the peak, and its ranks, layers and batch divide.

    The 2h that the paper's formula leaves out changes no printed digit.
    """
    assert f"{published_parameters(run.model) / 1e9:.1f}" == f"{parameters(run.model) / 1e9:.1f}" == run.billions
    assert run.parallel.world_size == run.gpus
    assert run.a % run.t == run.L % run.p == run.B % run.parallel.data_parallel_size == 0
    assert f"{utilization(run.teraflops * 1e12, 1, 1, A100_PEAK):.0%}" == f"{run.of_peak}%"


def test_megatrons_models():
    """Heads have 96 columns, and sizes are as printed (Shoeybi et al. 2019, table 1)."""
    assert all(f"{parameters(one.model) / 1e9:.1f}" == one.billions and one.model.head_size == 96 for one in MEGATRON)
    assert [one.t for one in MEGATRON] == list(STRONG_SCALING)
