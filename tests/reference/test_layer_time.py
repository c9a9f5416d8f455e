"""A layer's messages of context and expert parallelism take the time of what the ledger's formulas say is sent, and a
ring hides them behind its blocks.
"""
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from reference.config import ExpertsConfig, ParallelConfig
from reference.costs.flops import iteration_flops
from reference.costs.hardware import Link
from reference.costs.layer_time import expert_messages, groups_of, layer, sizes_of
from reference.costs.plans import Plan
from reference.costs.step_time import flops_of_step, rank_works, step_time
from reference.costs.traffic import contexts, dispatches
from tests.plan_cases import IDEAL, REAL, model_of

LINK = Link(latency=0.0, bandwidth=1e6)
ONLY_MESSAGES = replace(IDEAL, peak=1e40, inside=LINK, between=LINK, server=10**6)
ONE_IN_FOUR = ExpertsConfig(4, 2, moe_ffn_hidden_size=64)


@st.composite
def dealt_plans(draw, experts: bool = False):
    """Draw plans with context parallelism, in any way, and perhaps with experts that are dealt out."""
    t, c, d = draw(st.sampled_from((1, 2))), draw(st.sampled_from((2, 4))), draw(st.sampled_from((1, 2)))
    way, e = draw(st.sampled_from(("p2p", "all_gather", "a2a"))), draw(st.sampled_from((1, 2))) if experts else 1
    model = replace(model_of(2, a=16, s=32), experts=ONE_IN_FOUR if experts else None,
                    num_query_groups=draw(st.sampled_from((None, 8))))
    parallel = ParallelConfig(t, 1, d, context_parallel_size=c, cp_comm_type=way, expert_model_parallel_size=e)
    return Plan(model, parallel, 2, draw(st.sampled_from((1, 2))))


def sent(lines) -> float:
    """Return the bytes of these lines: of an all-gather or an all-to-all, less the part that a rank keeps."""
    return sum(line.elements * IDEAL.element_bytes for line in lines)


@given(dealt_plans())
def test_without_blocks_to_hide_behind_a_layer_takes_what_the_ledger_counts(plan):
    p, c = plan.parallel, plan.parallel.context_parallel_size
    lines = [line for phase in ("forward", "backward")
             for line in contexts(plan.model, p, plan.b * plan.positions, phase, 1, "L")]
    kept = 1 if p.cp_comm_type == "p2p" else (c - 1) / c
    found = layer(sizes_of(plan), ONLY_MESSAGES).total.context
    assert found == pytest.approx(sent(lines) * kept / LINK.bandwidth)


@given(dealt_plans(), st.floats(1e3, 1e12))
def test_a_ring_takes_no_longer_than_an_all_gather(plan, peak):
    """So the planner need not try the latter."""
    hardware = replace(ONLY_MESSAGES, peak=peak, inside=Link(1e-6, 1e6))
    ring, gathered = (layer(sizes_of(replace(plan, parallel=replace(plan.parallel, cp_comm_type=way))), hardware).total
                      for way in ("p2p", "all_gather"))
    assert ring.context <= gathered.context * (1 + 1e-12) and ring.products == gathered.products


def test_long_blocks_hide_all_but_the_gradients_last_hop():
    plan = Plan(model_of(2, s=32), ParallelConfig(context_parallel_size=4), 1)
    found = layer(sizes_of(plan), replace(ONLY_MESSAGES, peak=1.0))
    assert found.forward.context == 0
    assert found.input_gradient.context == pytest.approx(2 * 8 * 32 * IDEAL.element_bytes / LINK.bandwidth)


@given(dealt_plans(experts=True))
def test_dispatch_and_combine_take_what_the_ledger_expects(plan):
    lines = [line for line in dispatches(plan.model, plan.parallel, plan.b, plan.positions, "backward", 1)
             if line.group == "expert"]
    assert expert_messages(sizes_of(plan, experts=True), ONLY_MESSAGES) == pytest.approx(sent(lines) / LINK.bandwidth)


@given(dealt_plans(experts=True))
def test_all_ranks_together_compute_every_product_once(plan):
    """The router is whole on each of t ranks, and blocks' scores are computed again: no other product counts twice."""
    p = plan.parallel
    again = 0 if p.cp_comm_type == "a2a" else iteration_flops(plan.model, plan.m * plan.b * p.data_parallel_size, 32,
                                                              "selective") - flops_of_step(plan)
    seconds = sum(n * parts.products for parts, n in rank_works(plan, IDEAL).items())
    router = 3 * 2 * plan.model.num_layers * plan.b * plan.positions * plan.model.hidden_size * 4
    t = p.tensor_model_parallel_size
    found = (seconds * IDEAL.peak - router * (1 - 1 / t)) * plan.m * p.world_size
    assert found == pytest.approx(flops_of_step(plan) + again / 2)


def test_groups_count_through_t_c_d_and_p():
    plan = Plan(model_of(4, a=8, s=32), ParallelConfig(2, 2, 2, context_parallel_size=4), 2)
    plan = replace(plan, model=replace(plan.model, experts=ONE_IN_FOUR),
                   parallel=replace(plan.parallel, expert_model_parallel_size=4))
    found = groups_of(plan)
    assert {name: (one.ranks, one.stride) for name, one in found._asdict().items()} == {
        "tensor": (2, 1), "context": (4, 2), "shards": (8, 2), "instances": (1, 16), "pipeline": (2, 16),
        "experts": (4, 2), "expert_replicas": (2, 8)}
    hybrid = replace(plan.parallel, expert_model_parallel_size=1, zero_stage=1, num_distributed_optimizer_instances=2)
    found = groups_of(replace(plan, parallel=hybrid))
    assert [(one.ranks, one.stride) for one in (found.shards, found.instances)] == [(4, 2), (2, 8)]


@given(dealt_plans(experts=True))
def test_more_ranks_for_a_sequence_or_its_experts_hold_less(plan):
    p = plan.parallel
    alone = replace(plan, parallel=replace(p, context_parallel_size=1, expert_model_parallel_size=1,
                                           cp_comm_type="p2p"))
    assert plan.memory.activations < alone.memory.activations / p.context_parallel_size * 1.001
    if p.expert_model_parallel_size > 1:
        assert plan.memory.parameters == pytest.approx(alone.memory.parameters - 2 * plan.dealt * (
            p.expert_model_parallel_size - 1))
    assert min(step_time(plan, REAL)) >= 0
