"""A step's time, part by part: with all else for nothing, each is its formula over what the
hardware does in a second; and a schedule of which a part is played takes what it takes when all of it is.
"""
from dataclasses import fields, replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, example, given, strategies as st

from reference.comm.ring import ring_all_gather
from reference.config import RECOMPUTE, ParallelConfig, Recompute
from reference.costs import layer_time, step_time as module
from reference.costs.flops import forward_flops, iteration_flops
from reference.costs.hardware import Link, Sharded
from reference.costs.layer_time import NOTHING, Parts, groups_of, layer, sizes_of
from reference.costs.plans import Plan
from reference.costs.step_time import (StepTime, closed_form_makespan, flops_of_step, flops_per_second, played_makespan,
                                       rank_works, replica_messages, slowest_of, stage_works, step_time, transfer_time)
from reference.costs.volumes import data_parallel_traffic, pipeline_traffic, tensor_parallel_traffic
from reference.parallel.stages import schedule_of
from reference.schedules.simulate import Times, simulate
from tests.plan_cases import FREE, IDEAL, REAL, model_of, plans

LINK = Link(latency=0.0, bandwidth=1e6)


def with_recompute(plan, recompute: str):
    return replace(plan, parallel=replace(plan.parallel, recompute=Recompute(recompute)))


# ---- products -------------------------------------------------------------------------------------------------------


@given(plans())
def test_products_are_all_flops_of_a_step(plan):
    """All ranks together count every FLOP of a step once, recompute included."""
    p = plan.parallel
    seconds = sum(ranks * parts.products for parts, ranks in rank_works(plan, IDEAL).items())
    flops = seconds * IDEAL.peak * plan.m * p.data_parallel_size * p.tensor_model_parallel_size
    B, s = plan.m * plan.b * p.data_parallel_size, plan.model.max_position_embeddings
    assert flops == pytest.approx(iteration_flops(plan.model, B, s, p.recompute.granularity))
    assert flops_of_step(plan, p.recompute.granularity) == pytest.approx(flops)
    assert flops_per_second(plan, 2.0) == iteration_flops(plan.model, B, s) / 2 / p.world_size


@given(plans())
def test_forward_input_gradient_and_weight_gradient_have_their_flops(plan):
    """A product without parameters, attention's core, has no gradient of weights, but two of its inputs."""
    works, c, t = stage_works(plan, IDEAL), plan.model, plan.parallel.tensor_model_parallel_size
    linear, core, logits = forward_flops(c, plan.b, c.max_position_embeddings)
    again = {"none": 0, "selective": core, "full": linear + core}[plan.parallel.recompute.granularity]
    forward, i, w = (t * IDEAL.peak * sum(getattr(work, part).products for work in works) for part in NOTHING._fields)
    assert (forward, i, w) == pytest.approx((linear + core + logits, linear + 2 * core + logits + again,
                                             linear + logits))


@given(plans())
def test_a_bert_has_a_layer_before_its_logits(plan):
    """Every rank computes it whole; with sequence parallelism, for its own positions."""
    c, p = plan.model, plan.parallel
    bert = replace(plan, model=replace(c, architecture="bert", heads=("lm",)))
    gpt, more = (sum(work.total.products for work in stage_works(one, IDEAL)) for one in (plan, bert))
    copies = 1 if p.sequence_parallel else p.tensor_model_parallel_size
    once = iteration_flops(bert.model, plan.b, c.max_position_embeddings) - iteration_flops(
        c, plan.b, c.max_position_embeddings)
    assert (more - gpt) * IDEAL.peak * p.tensor_model_parallel_size == pytest.approx(copies * once)


@given(plans())
def test_stages_and_ranks_have_the_same_work(plan):
    """One microbatch takes the same time, counted by stages or by ranks."""
    by_stage = sum(work.total.total for work in stage_works(plan, REAL))
    assert by_stage == pytest.approx(sum(n * parts.total for parts, n in rank_works(plan, REAL).items()))
    assert rank_works(plan, REAL).total() == plan.parallel.pipeline_model_parallel_size


@pytest.mark.parametrize("schedule, v, p, layers", [
    ("1f1b", None, 3, [4, 3, 3]), ("interleaved", 2, 3, [2, 2, 2, 2, 1, 1]), ("interleaved", 3, 2, [2, 2, 2, 2, 1, 1]),
    ("zb-v", None, 3, [2, 2, 2, 2, 1, 1]), ("dualpipe-v", None, 2, [3, 3, 2, 2]),
])
def test_the_works_of_stages_are_in_the_order_of_the_layers(schedule, v, p, layers):
    """Wherever the stages are placed. Ten layers, each of which takes a second; the embedding takes 100, the logits
    1000 of them.
    """
    plan = Plan(model_of(10), ParallelConfig(1, p, 1, schedule, v), 2 * p)
    b, s, h, *_ = sizes_of(plan)
    passes = replace(IDEAL.passes, embedding=(100 / (b * s * h), 0), logits=(1000 / (b * s * plan.model.vocab_size), 0))
    hardware = replace(IDEAL, bandwidth=float(IDEAL.element_bytes), overhead=(1.0, 0.0), passes=passes)
    first, *middle, last = layers
    found = [work.forward.kernels for work in stage_works(plan, hardware)]
    assert found == pytest.approx([first + 100, *middle, last + 1000])


@given(plans(), st.sampled_from(RECOMPUTE))
def test_a_recompute_is_a_part_of_the_forward(plan, recompute):
    """It is attention's core, or all of the layer with its messages; the forward and the weights' gradients stay."""
    none, again = (layer(sizes_of(with_recompute(plan, one)), REAL) for one in ("none", recompute))
    assert (none.forward, none.weight_gradient) == (again.forward, again.weight_gradient)
    more = again.input_gradient.total - none.input_gradient.total
    b, s, h, a, t = sizes_of(plan)[:5]
    core = (4 * b * s**2 * h / t / (REAL.peak * REAL.attention[0])
            + b * a * s**2 / t * REAL.passes.scores[0] * REAL.element_bytes / REAL.bandwidth)
    assert more == pytest.approx({"none": 0, "selective": core, "full": none.forward.total}[recompute], abs=1e-18)


@given(plans())
def test_kernels_are_passes_through_memory(plan):
    """With a pass that counts 1, forward and backward, seconds are elements. Only sequence parallelism shards those
    outside the regions.
    """
    once = replace(IDEAL, bandwidth=float(IDEAL.element_bytes), overhead=(0.0, 0.0))
    b, s, h, a, t = sizes_of(plan)[:5]
    outside = b * s * h / (t if plan.parallel.sequence_parallel else 1)
    plain = sizes_of(with_recompute(plan, "none"))
    for name, elements in (("outside", outside), ("inside", b * s * h / t), ("scores", b * a * s**2 / t)):
        work = layer(plain, replace(once, passes=replace(IDEAL.passes, **{name: (1.0, 10.0)})))
        assert work.forward.kernels == pytest.approx(elements)
        assert work.total.kernels == pytest.approx(11 * elements)
    for name, elements in (("embedding", b * s * h), ("logits", b * s * plan.model.padded_vocab_size(t) / t)):
        works = stage_works(plan, replace(once, passes=replace(IDEAL.passes, **{name: (1.0, 10.0)})))
        found = [work.total.kernels for work in works]
        assert found[0 if name == "embedding" else -1] == pytest.approx(11 * elements)
        assert sum(found) == pytest.approx(11 * elements)
    assert layer(plain, replace(IDEAL, overhead=(2.0, 3.0))).total.kernels == 5


# ---- messages -------------------------------------------------------------------------------------------------------


@given(plans())
def test_messages_of_a_layer_are_those_of_the_papers(plan):
    p, c = plan.parallel, plan.model
    sizes = plan.b, c.max_position_embeddings, c.hidden_size, p.tensor_model_parallel_size
    sent = tensor_parallel_traffic(*sizes, p.sequence_parallel and not p.keep_gathered_inputs)
    if p.recompute.granularity == "full":
        sent += tensor_parallel_traffic(*sizes) / 2
    took = layer(sizes_of(plan), replace(IDEAL, inside=LINK, between=LINK, server=10**6)).total.messages
    assert took == pytest.approx(sent * IDEAL.element_bytes / LINK.bandwidth)


@given(plans())
def test_messages_of_the_ends_are_all_reduces_of_an_activation(plan):
    """Of the embedding's output forward, and of the gradient of the logits' input backward."""
    links = replace(IDEAL, inside=LINK, between=LINK, server=10**6)
    b, s, h, t = plan.b, plan.model.max_position_embeddings, plan.model.hidden_size, sizes_of(plan).t
    once = 2 * (t - 1) / t * b * s * h * IDEAL.element_bytes / LINK.bandwidth
    works, layers = stage_works(plan, links), layer(sizes_of(plan), links).total.messages
    assert sum(work.total.messages for work in works) == pytest.approx(2 * once + plan.model.num_layers * layers)


@given(plans())
def test_every_turn_of_a_ring_takes_the_latency(plan):
    """Four all-reduces a layer, or as many halves, 2 (t - 1) turns each: and one for the embedding, one for the logits.
    """
    p, late = plan.parallel, replace(IDEAL, inside=Link(1.0, 1e40), between=Link(1.0, 1e40))
    t, turns = p.tensor_model_parallel_size, 8 + 4 * (p.recompute.granularity == "full")
    turns += 2 * (p.sequence_parallel and not p.keep_gathered_inputs)
    messages = sum(work.total.messages for work in stage_works(plan, late))
    assert messages == pytest.approx((t - 1) * (turns * plan.model.num_layers + 4))


@given(plans())
def test_a_stage_sends_its_result_in_parts_which_are_gathered(plan):
    p, c = plan.parallel, plan.model
    t, cut = p.tensor_model_parallel_size, p.scatter_gather_tensors_in_pipeline or p.sequence_parallel
    x = plan.b * c.max_position_embeddings * c.hidden_size
    sent = pipeline_traffic(plan.b, c.max_position_embeddings, c.hidden_size, t if cut else 1)
    gathered = ring_all_gather(x, t) if cut and not p.sequence_parallel else 0
    expected = (sent + gathered) * 2 / LINK.bandwidth if p.pipeline_model_parallel_size > 1 else 0
    assert transfer_time(plan, replace(IDEAL, inside=LINK, between=LINK, server=10**6)) == pytest.approx(expected)


def table_messages(plan) -> float:
    """Return the elements that the sum of a tied table's two copies sends: it never overlaps."""
    p, c = plan.parallel, plan.model
    return c.vocab_size // p.tensor_model_parallel_size * c.hidden_size * (p.pipeline_model_parallel_size > 1)


@given(plans(), st.floats(0, 1))
def test_replicas_send_what_zero_sends_less_the_overlap(plan, hidden):
    """Where computing takes longer than messages. ZeRO-3's overlap is a number of its own."""
    p = plan.parallel
    hardware = replace(IDEAL, peak=1.0, inside=LINK, between=LINK, server=10**6, hidden=1 - hidden)
    hardware = replace(hardware, **{"sharded": Sharded(hidden=hidden)} if p.zero_stage == 3 else {"hidden": hidden})
    sent = (1 - hidden) * data_parallel_traffic(plan.psi, p.data_parallel_size, p.zero_stage, plan.m,
                                                p.num_distributed_optimizer_instances)
    assert replica_messages(plan, hardware) == pytest.approx((sent + table_messages(plan)) * 2 / LINK.bandwidth)


@given(plans(), st.floats(0, 1))
def test_no_message_hides_behind_more_than_there_is_to_compute(plan, hidden):
    """Where messages take longer, a share of the computing hides them: of the last backward, and with ZeRO-1 of a
    forward; with ZeRO-2 of all backwards and a forward; with ZeRO-3 of everything.
    """
    p, m = replace(plan.parallel, pipeline_schedule="1f1b", virtual_pipeline_size=None,
                   num_distributed_optimizer_instances=1), plan.m
    assume(p.data_parallel_size > 1)
    plan = replace(plan, parallel=p)
    busiest = max(stage_works(plan, IDEAL), key=lambda work: work.total.products)
    forward, whole = busiest.forward.products, busiest.total.products
    slow = Link(0.0, data_parallel_traffic(plan.psi, p.data_parallel_size) / (100 * m * whole))
    hardware = replace(IDEAL, inside=slow, between=slow, server=10**6, hidden=hidden, sharded=Sharded(hidden=hidden))
    sent = data_parallel_traffic(plan.psi, p.data_parallel_size, p.zero_stage, m) + table_messages(plan)
    works = (whole - forward, whole, m * (whole - forward) + forward, m * whole)
    assert sent * 2 / slow.bandwidth - replica_messages(plan, hardware) == pytest.approx(hidden * works[p.zero_stage],
                                                                                      rel=1e-6, abs=1e-6 * whole)


def test_only_zero_3_sends_layers_one_by_one_and_reaches_what_its_implementation_does():
    """Two layers on each of 4 ranks, in servers of 2: 3 turns for each layer and gather, and the limit outside."""
    late = replace(IDEAL, server=2, between=Link(1.0, 1e40), sharded=Sharded(bandwidth=7.0))
    plan = Plan(model_of(2), ParallelConfig(1, 1, 4), 1)
    seconds = [replica_messages(replace(plan, parallel=replace(plan.parallel, zero_stage=zero)), late)
               for zero in range(4)]
    assert seconds[:3] == pytest.approx([6, 6, 6])
    assert seconds[3] == pytest.approx(3 * (2 * 3 + 2 * plan.psi * 3 / 4 / 7))
    alone = replace(plan, parallel=ParallelConfig(1, 1, 2, zero_stage=3))
    assert replica_messages(alone, late) == pytest.approx(0)


@given(plans(), st.sampled_from((2, 4, 8, 10**6)))
def test_only_messages_that_leave_a_server_go_between_servers(plan, server):
    """A world in one server never does; otherwise a pipeline does, and with it the two copies of the table."""
    p = plan.parallel
    hardware = replace(IDEAL, server=server, between=Link(1.0, 1e40))
    assume(p.pipeline_model_parallel_size > 1 and p.world_size != server)
    late = 0 if p.world_size < server else 1
    whole = not p.scatter_gather_tensors_in_pipeline or p.sequence_parallel or p.tensor_model_parallel_size == 1
    if whole:
        assert transfer_time(plan, hardware) == pytest.approx(late)
    if p.data_parallel_size == 1:
        assert replica_messages(plan, hardware) == pytest.approx(2 * late)


@given(plans())
def test_groups_are_the_lines_of_the_world(plan):
    """Ranks count through t first, then d, of which an instance has neighbours, then p."""
    p = plan.parallel
    world = np.arange(p.world_size).reshape(p.pipeline_model_parallel_size, p.num_distributed_optimizer_instances,
                                            p.instance_size, p.tensor_model_parallel_size)
    lines = world[0, 0, 0], world[0, 0, :, 0], world[0, :, 0, 0], world[:, 0, 0, 0]
    for group, line in zip(groups_of(plan), lines):
        assert list(range(0, group.ranks * group.stride, group.stride)) == line.tolist()
        assert group.world == p.world_size


# ---- the pipeline ---------------------------------------------------------------------------------------------------


def all_played(plan, hardware) -> float:
    """Simulate every microbatch."""
    works = stage_works(plan, hardware)
    durations = ([getattr(work, part).total for work in works] for part in NOTHING._fields)
    times = Times(*durations, transfer_time(plan, hardware))
    return simulate(schedule_of(plan.parallel, plan.m), times).makespan


@given(plans(even=True, most_m=6), st.floats(0, 0.02))
def test_with_equal_stages_both_makespans_are_exact(plan, share):
    """There is no embedding and no head, and messages are short compared with a stage."""
    with patch.object(module, "embedding", lambda *_: NOTHING), patch.object(module, "head", lambda *_: NOTHING):
        forward = stage_works(plan, IDEAL)[0].forward.total
        hardware = replace(IDEAL, inside=Link(share * forward, 1e40), between=Link(share * forward, 1e40))
        with patch.object(layer_time, "region_messages", lambda *_, **__: 0.0):
            layer.cache_clear()
            expected = all_played(plan, hardware)
            assert played_makespan(plan, hardware) == pytest.approx(expected, rel=1e-9)
            assert closed_form_makespan(plan, hardware) == pytest.approx(expected, rel=1e-9)
    layer.cache_clear()


@given(plans(most_m=40))
@example(Plan(model_of(7, head=4), ParallelConfig(1, 4, 2), 43))      # three microbatches are a period of four stages
def test_a_few_microbatches_of_unequal_stages_predict_all(plan):
    """They nearly do; less so if interleaved stages have unequal numbers of layers, which the planner never plans."""
    uneven = plan.parallel.virtual_pipeline_size and plan.model.num_layers % len(stage_works(plan, REAL))
    assert played_makespan(plan, REAL) == pytest.approx(all_played(plan, REAL), rel=0.05 if uneven else 0.002)


@given(plans())
def test_the_closed_form_is_near_the_simulation_and_not_below_it_without_interleaving(plan):
    closed, played = closed_form_makespan(plan, REAL), all_played(plan, REAL)
    assert played == pytest.approx(closed, rel=0.35)
    if not plan.parallel.virtual_pipeline_size:
        assert played <= closed * (1 + 1e-9)


# ---- a step ---------------------------------------------------------------------------------------------------------


@given(plans(), st.booleans())
def test_a_step_is_the_sum_of_its_parts(plan, closed):
    """The pipeline, which takes no less than its busiest rank, then what replicas send, then the optimizer; and all of
    it longer for the slowest replica.
    """
    found, p = step_time(plan, REAL, closed), plan.parallel
    calm = step_time(plan, replace(REAL, jitter=0.0), closed)
    busiest = max(rank_works(plan, REAL), key=sum)
    makespan = max(plan.m * sum(busiest), (closed_form_makespan if closed else played_makespan)(plan, REAL))
    optimizer = plan.psi / p.shards * REAL.optimizer / REAL.bandwidth
    assert calm.optimizer == pytest.approx(optimizer)
    assert calm.total == pytest.approx(makespan + replica_messages(plan, REAL) + optimizer)
    assert found.total == pytest.approx(calm.total * (1 + REAL.jitter * slowest_of(p.data_parallel_size)))
    assert found.total == pytest.approx(sum(found)) and found._replace(replicas=0) == calm._replace(replicas=0)
    assert min(found) >= 0
    assert Parts(*found[:5]) == pytest.approx(Parts(*(plan.m * part for part in busiest)))
    if p.pipeline_model_parallel_size == 1:
        assert found.idle == pytest.approx(0, abs=1e-12 * found.total)


FASTER = ["peak", "bandwidth", "inside", "between"]


@given(plans(most_m=3), st.sampled_from(FASTER), st.floats(1, 10), st.booleans())
def test_a_step_never_takes_longer_on_faster_hardware(plan, name, times, closed):
    """The same holds for links of less latency."""
    value = getattr(REAL, name)
    better = (Link(value.latency / times, value.bandwidth * times) if isinstance(value, Link) else value * times)
    before, after = (step_time(plan, one, closed).total for one in (REAL, replace(REAL, **{name: better})))
    assert after <= before * (1 + 1e-9)
    if name in ("peak", "bandwidth") and times > 1.01:
        assert after < before


@pytest.mark.parametrize("n", [2, 3, 8, 64, 512])
def test_the_slowest_of_n_is_as_late_as_in_a_trial(n):
    """The mean of the largest of n normal numbers, over many draws."""
    trials = np.random.default_rng(n).normal(size=(4000, n)).max(axis=1)
    assert slowest_of(n) == pytest.approx(trials.mean(), abs=4 * trials.std() / 4000**0.5 + 0.01)


def test_one_replica_does_not_wait():
    assert slowest_of(1) == 0


def test_no_part_of_the_hardware_is_left_out():
    """Every number of a profile, but those of memory, its names and its format, changes the time of some step."""
    plan = Plan(model_of(6), ParallelConfig(2, 3, 2), 4)
    sharded = replace(plan, parallel=ParallelConfig(2, 3, 4, zero_stage=3))
    base, slower = (step_time(one, REAL) for one in (plan, sharded))
    for change in (Sharded(bandwidth=1e9), Sharded(hidden=0.5)):
        assert step_time(sharded, replace(REAL, sharded=change)) != slower
        assert step_time(plan, replace(REAL, sharded=change)) == base
    changes = {"efficiency": ((8.0, 0.2),), "attention": (0.5, 0.6), "overhead": (1e-6, 1e-6), "inside": FREE,
               "between": FREE, "server": 16, "passes": replace(REAL.passes, scores=(9.0, 9.0))}
    for field in fields(REAL):
        if field.name not in ("name", "about", "memory", "reserved", "half", "sharded"):
            value = changes.get(field.name, 2 * getattr(REAL, field.name) if field.name not in changes else None)
            assert step_time(plan, replace(REAL, **{field.name: value})) != base, field.name
    assert isinstance(base, StepTime)
