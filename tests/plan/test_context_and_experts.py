"""The planner tries every context-parallel and expert-parallel size that the model allows, and says what they cost."""
from dataclasses import replace
from math import prod

import pytest

from reference.config import ExpertsConfig
from reference.costs.hardware import Link
from shardlab.plan import candidates
from shardlab.plan.candidates import PlanSearch, check, tensor_sizes
from shardlab.plan.options import model_of as model_of_options, parse
from shardlab.plan.reasons import reasons
from tests.plan.test_launch_line import is_the_plan, understood
from tests.plan_cases import REAL, model_of

EXPERTS = ExpertsConfig(4, 2)


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch):
    monkeypatch.setattr(candidates, "LEAST_POSITIONS", 4)


def job(n: int = 4, experts: ExpertsConfig | None = None, groups: int = 4, s: int = 16, **hardware) -> PlanSearch:
    return PlanSearch(replace(model_of(2, s=s), experts=experts, num_query_groups=groups), n, 4,
                      replace(REAL, **hardware))


def test_all_sizes_that_fit_together_are_tried_and_no_others():
    """2c divides s, c divides a rank's groups for a2a, and e divides both c d and the experts."""
    for groups, exchanged in ((4, {(1, 2), (1, 4), (2, 2)}), (2, {(1, 2)}), (1, set())):
        plans = job(8, EXPERTS, groups).plans
        assert len(set(plans)) == len(plans) and all(prod(candidates.shape_of(one)) == 8 for one in plans)
        found = [one.parallel for one in plans]
        assert {p.context_parallel_size for p in found} == {1, 2, 4}
        assert {(p.tensor_model_parallel_size, p.context_parallel_size) for p in found
                if p.cp_comm_type == "a2a"} == exchanged
        assert {(p.replicas, p.expert_model_parallel_size) for p in found} == {
            (replicas, e) for replicas in (1, 2, 4, 8) for e in (1, 2, 4) if replicas % e == 0}
    assert {one.parallel.context_parallel_size for one in job(s=17).plans} == {1}


def test_the_line_to_copy_is_the_plan():
    for experts in (None, EXPERTS):
        for plan in job(8, experts, groups=4).plans[::37]:
            plan = replace(plan, model=replace(plan.model, num_query_groups=None))
            is_the_plan(understood(plan, None), plan)


def told(found: PlanSearch) -> str:
    check(found)
    return "\n".join(reasons(found))


def test_reasons_for_context_parallelism():
    """Where messages are dear it is left alone; where memory is short nothing else fits."""
    slow = Link(1e-3, 1e8)
    said = told(job(inside=slow, between=slow, memory=1e9))
    assert "Context parallelism is not needed" in said and "With c above 1 the best" in said
    least = min(sum(job(8).needs(one)) for one in job(8, s=512).plans)
    assert "Context parallelism, c = " in (said := told(job(8, s=512, memory=REAL.reserved + 1.01 * least)))
    assert "With c = 1 nothing fits." in said


def test_reasons_for_expert_parallelism():
    slow = Link(1e-3, 1e8)
    said = told(job(4, EXPERTS, inside=slow, between=slow, memory=1e9))
    assert "Expert parallelism, e = 1: each rank holds 4 of a layer's 4 experts." in said
    many = job(4, replace(EXPERTS, num_experts=64))
    least = min(sum(many.needs(one)) for one in many.plans if one.parallel.zero_stage < 3)
    said = told(job(4, replace(EXPERTS, num_experts=64), memory=REAL.reserved + 1.01 * least))
    assert "e = 4: each rank holds 16 of a layer's 64 experts" in said and "With all experts on" in said


LLAMA = """--num-layers 4 --hidden-size 256 --num-attention-heads 12 --group-query-attention --num-query-groups 4
    --kv-channels 24 --seq-length 128 --swiglu --disable-bias-linear --normalization RMSNorm --ffn-hidden-size 480
    --qk-layernorm --position-embedding-type rope --rotary-base 50000 --untie-embeddings-and-output-weights
    --num-gpus 2 --global-batch-size 4 --num-experts 4 --moe-ffn-hidden-size 60 --moe-layer-freq 2
    --moe-aux-loss-coeff 0.01""".split()


def test_the_line_of_a_model_with_all_options_is_its_plan():
    model = model_of_options(parse(LLAMA))
    assert (model.groups, model.head_size, model.experts.moe_layer_freq, model.tied) == (4, 24, 2, False)
    plan = PlanSearch(model, 2, 4, REAL).plans[-1]
    is_the_plan(understood(plan, None), plan)


def test_t_shards_all_of_a_model_evenly():
    """12 heads in 4 groups, 480 columns of the MLP, and 60 or 6 of an expert."""
    for more, sizes in (("", [1, 2, 4]), ("--hidden-size 240", [1, 2, 4, 12]), ("--moe-ffn-hidden-size 6", [1, 2])):
        assert tensor_sizes(model_of_options(parse([*LLAMA, *more.split()]))) == sizes
