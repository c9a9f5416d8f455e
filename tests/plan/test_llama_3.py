"""Llama 3's 4D table (Meta 2024, 2407.21783, table 4) beside our formulas, with the profile dgx-h100 as it is: none of
its numbers was set for this table. The paper prints neither v nor b: b is 1, and v the one that makes a step fastest.
"""
from dataclasses import replace

import pytest

from reference.config import Recompute
from reference.costs.parameters import parameters
from reference.costs.plans import Plan
from reference.costs.published import H100_PEAK, LLAMA_3, LongRun
from reference.costs.step_time import flops_per_second, step_time
from shardlab.plan.candidates import PlanSearch, shapes
from shardlab.plan.profiles import load

H100 = load("dgx-h100")
IDS = [f"{run.gpus} GPUs, {run.s} positions" for run in LLAMA_3]


def plan_of(run: LongRun, recompute: str, v: int | None, zero: int = 1) -> Plan:
    return Plan(run.model, run.parallel(pipeline_schedule="interleaved" if v else "1f1b", virtual_pipeline_size=v,
                                        zero_stage=zero, recompute=Recompute(recompute)), run.samples)


@pytest.mark.parametrize("run", LLAMA_3, ids=IDS)
def test_a_row_holds_together(run):
    """Its ranks are the product of its sizes, 16.8 million tokens a step, its share of the peak within a point; and it
    is searched.
    """
    assert (run.t, run.p, run.d, run.c) in shapes(run.model, run.d * run.samples)
    assert run.parallel().world_size == run.gpus and run.d * run.samples * run.s == 1 << 24
    assert f"{parameters(run.model) / 1e9:.1f}" == "405.9"
    assert abs(100 * run.teraflops * 1e12 / H100_PEAK - float(run.of_peak)) < 1


@pytest.mark.parametrize("run, off", list(zip(LLAMA_3, (0.00, -0.04, -0.08))), ids=IDS)
def test_the_share_of_the_peak(run, off):
    """Ours is as far off as stated: 430, 386 and 350 TFLOP/s. All of attention's core counts, as in the other papers;
    in the last row it is most of the work, and if the paper counts half of it for the mask, ours is 250, 34 % off.
    """
    found = max(flops_per_second(plan, step_time(plan, H100).total)
                for plan in (plan_of(run, "selective", v) for v in (None, 2, 4, 7)))
    assert found / 1e12 / run.teraflops - 1 == pytest.approx(off, abs=0.01)


@pytest.mark.parametrize("run, even, published, sharded", list(zip(
    LLAMA_3, (84.8, 84.5, 82.3), (74.6, 74.3, 72.2), (68.6, 68.2, 66.1))), ids=IDS)
def test_memory_without_recompute(run, even, published, sharded):
    """With eight layers on the first rank, as ours deals out 126, a step has 6 to 9 GB more than fit. The paper gave
    the end stages a layer less, for this: then it fits, and with gradients sharded, as by its FSDP, there is room to
    interleave stages. (Fused attention keeps no scores: `selective`.)
    """
    ends = replace(run.model, num_layers=7 * run.p)
    plan, room = plan_of(run, "selective", None), H100.memory - H100.reserved
    found = [plan, replace(plan, model=ends), replace(plan_of(run, "selective", None, zero=2), model=ends)]
    assert [sum(one.memory) / 1e9 for one in found] == pytest.approx([even, published, sharded], abs=0.05)
    assert [sum(one.memory) < room for one in found] == [False, True, True]
    assert sum(plan_of(run, "full", None).memory) < room


@pytest.mark.deep
def test_the_planner_prefers_context_parallelism_for_a_long_sequence():
    """With c = 1 the best plan has t = 128, and takes more than twice as long."""
    run = LLAMA_3[-1]
    found = PlanSearch(run.model, run.gpus, run.d * run.samples, H100)
    alone = next(one for one in found.fitting if one.shape[3] == 1)
    assert found.best[0].shape == (16, 2, 16, 32) and alone.shape[0] == 128
    assert alone.seconds > 2 * found.best[0].seconds
