"""The papers' tables, as the walkthroughs have them, hold together."""
import pytest

from reference.costs.flops import utilization
from reference.costs.parameters import parameters, published_parameters
from reference.costs.published import A100_PEAK, FSDP, MEGATRON, MPT, PTD_P, STRONG_SCALING, TABLE_2


@pytest.mark.parametrize("run", PTD_P, ids=lambda run: run.billions)
def test_a_run_of_ptd_p(run):
    """Each row of the table has the printed size and share of the peak, and its ranks, layers and batch divide.

    The 2h that the paper's formula leaves out changes no printed digit.
    """
    assert f"{published_parameters(run.model) / 1e9:.1f}" == f"{parameters(run.model) / 1e9:.1f}" == run.billions
    assert run.parallel.world_size == run.gpus
    assert run.a % run.t == run.L % run.p == run.B % run.parallel.data_parallel_size == 0
    assert f"{utilization(run.teraflops * 1e12, 1, 1, A100_PEAK):.0%}" == f"{run.of_peak}%"


@pytest.mark.parametrize("run", TABLE_2, ids=lambda run: f"{run.billions}B, {run.gpus} GPUs, t = {run.t}")
def test_a_run_of_the_second_table(run):
    """Its size is as printed, its ranks and batch divide, and its days are those of 300 billion tokens (equation 4)
    within 4 %.
    """
    psi = parameters(run.model)
    assert f"{psi / 1e9:.1f}" == run.billions and run.gpus % (run.t * run.p) == run.L % run.p == 0
    replicas = run.gpus // (run.t * run.p)
    assert run.B % (replicas * run.b) == 0 and (run.t > 1 or replicas * run.b == run.B)
    assert 8 * 300e9 * psi / (run.gpus * run.teraflops * 1e12) / 86_400 / run.days == pytest.approx(0.98, abs=0.02)


def test_mosaicmls_models():
    """They have exactly the parameters of its table."""
    models = {run.billions: run.model for run in FSDP}
    assert {name: parameters(model) for name, model in models.items()} == {name: row[-1] for name, row in MPT.items()}


def test_megatrons_models():
    """Heads have 96 columns, and sizes are as printed (Shoeybi et al. 2019, table 1)."""
    assert all(f"{parameters(one.model) / 1e9:.1f}" == one.billions and one.model.head_size == 96 for one in MEGATRON)
    assert [one.t for one in MEGATRON] == list(STRONG_SCALING)
