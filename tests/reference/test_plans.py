"""The errors of a plan, and its fullest rank. Memory, traffic and idle time of published models, beside the papers'
formulas written out: tests/notebooks/test_plan.py.
"""
from dataclasses import replace

import pytest
from hypothesis import example, given, strategies as st

from reference.config import ParallelConfig, Recompute
from reference.costs.memory import layer_activations
from reference.costs.parameters import parameters_of_stage
from reference.costs.plans import Plan
from reference.errors import UserError
from reference.parallel.model_states import model_states
from reference.parallel.stages import layers_of_rank, layouts_of_ranks, schedule_of, stages_of_ranks
from reference.schedules.actions import Send, lower
from reference.schedules.generators import SCHEDULES, check_microbatches, make
from reference.schedules.simulate import activations_in_flight
from tests.plan_cases import model_of, plans


def held(plan, rank: int) -> float:
    """Return the bytes of a rank of the pipeline, found by walking through its schedule."""
    c, p, s = plan.model, plan.parallel, plan.model.max_position_embeddings
    t, last = p.tensor_model_parallel_size, p.pipeline_model_parallel_size - 1
    layers = layers_of_rank(stages_of_ranks(c, p)[rank])
    psi = parameters_of_stage(c, t, layers)
    kept, whole = (sum(layer_activations(c, plan.b, s, t, p.sequence_parallel, one))
                   for one in (p.recompute.granularity, "none"))
    stages = activations_in_flight(schedule_of(p, plan.m))[rank]
    found = sum(model_states(psi, p.instance_size, p.zero_stage))
    found += stages * len(layers) / (p.virtual_pipeline_size or 1) * kept + whole - kept
    if rank == 0:
        found += (last + 1) * plan.b * s * c.hidden_size / t          # dropout's masks after the embedding
    if rank == last:
        found += plan.b * s * (2 + 2) * c.hidden_size / t + 4 * plan.b * s * c.vocab_size / t
    return found


@given(plans(), st.sampled_from((96, 12_000)))
@example(Plan(model_of(4), ParallelConfig(1, 2, recompute=Recompute("full")), 4, 2), 12_000)     # the last rank
def test_memory_is_that_of_the_fullest_rank(plan, V):
    """With a large vocabulary, or full recompute, that may be the last rank, which has the logits."""
    plan = replace(plan, model=replace(plan.model, vocab_size=V))
    last = plan.parallel.pipeline_model_parallel_size - 1
    ends = [held(plan, rank) for rank in (0, last)]
    assert sum(plan.memory) == pytest.approx(max(ends))
    assert max(ends) >= max(held(plan, rank) for rank in range(last + 1)) * (1 - 1e-12)


@given(plans(), st.integers(2, 3))
def test_activations_and_messages_are_proportional_to_b(plan, times):
    larger = replace(plan, b=times * plan.b)
    assert larger.memory_of(0).activations == pytest.approx(times * plan.memory_of(0).activations)
    assert larger.messages[:2] == pytest.approx(tuple(times * size for size in plan.messages[:2]))
    assert (larger.memory_of(0)[:3], larger.messages.data) == (plan.memory_of(0)[:3], plan.messages.data)


@given(plans())
@example(Plan(model_of(8), ParallelConfig(2, 2, 1, "interleaved", 2), 4))
@example(Plan(model_of(5), ParallelConfig(2, 2, sequence_parallel=True, recompute=Recompute("full")), 3, 2))
@example(Plan(model_of(5), ParallelConfig(2, 2, sequence_parallel=True, keep_gathered_inputs=True), 3))
def test_messages_are_those_of_the_first_rank(plan):
    """The schedule gives their number between stages. In a layer the rings of tensor parallelism go round 8 times,
    2 more if inputs are gathered again, and 4 more if the forward is recomputed.
    """
    p, t, s = plan.parallel, plan.parallel.tensor_model_parallel_size, plan.model.max_position_embeddings
    x = plan.b * s * plan.model.hidden_size / t
    sends = sum(isinstance(step, Send) for step in lower(schedule_of(p, plan.m))[0])
    assert plan.messages.pipeline == pytest.approx(2 * sends * x)
    rounds = 8 + 2 * (p.sequence_parallel and not p.keep_gathered_inputs) + 4 * (p.recompute.granularity == "full")
    assert plan.messages.tensor == pytest.approx(2 * plan.m * len(plan.layers) * rounds * x * (t - 1))


@given(plans())
def test_parameters_are_the_elements_of_the_first_ranks_buffer(plan):
    """The optimizer moves 1/d of them with ZeRO."""
    unsharded = replace(plan.parallel, zero_stage=0, num_distributed_optimizer_instances=1)
    layout, *_ = layouts_of_ranks(plan.model, unsharded)
    assert plan.psi == layout.size
    assert plan.owned * plan.parallel.shards == plan.psi


@given(plans())
def test_kinds_of_ranks_are_those_of_the_pipeline(plan):
    stages = stages_of_ranks(plan.model, plan.parallel)
    layers = list(map(layers_of_rank, stages))
    assert plan.pipeline.kinds.total() == len(stages) and plan.layers == layers[0]
    for kind, ranks in plan.pipeline.kinds.items():
        assert ranks == sum((len(one), 0, 0 in one, plan.model.num_layers - 1 in one) == kind for one in layers)


@pytest.mark.parametrize("name", SCHEDULES)
@given(p=st.integers(1, 6), m=st.integers(-1, 20))
def test_microbatches_are_checked_as_the_schedule_checks_them(name, p, m):
    """The check needs no schedule."""
    def refused(act, *args) -> str:
        try:
            act(*args)
        except UserError as error:
            return str(error)
        return ""

    v = 2 if name == "interleaved" else None
    assert refused(check_microbatches, name, p, m) == refused(make, name, p, m, v)


@pytest.mark.parametrize("wrong, says", [
    (lambda: Plan(model_of(4), ParallelConfig(1, 2), 0), "microbatches m is 0"),
    (lambda: Plan(model_of(4), ParallelConfig(1, 5), 5), "every stage needs a layer"),
    (lambda: Plan(model_of(4), ParallelConfig(1, 2, 1, "interleaved", 2), 3), "no multiple of 2"),
    (lambda: Plan(model_of(4), ParallelConfig(1, 2, 1, "interleaved"), 2), "needs -v"),
    (lambda: Plan(model_of(4), ParallelConfig(1, 2, 1, "1f1b", 2), 2), "-v is 2"),
    (lambda: Plan(model_of(4), ParallelConfig(3), 2), "must divide --num-attention-heads"),
    (lambda: Plan(model_of(4, s=15), ParallelConfig(2, sequence_parallel=True), 2), "must divide --seq-length")])
def test_an_impossible_plan_is_refused_in_a_sentence(wrong, says):
    with pytest.raises(UserError, match=says):
        wrong()
