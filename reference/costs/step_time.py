"""The time of a step: a plan (plans.py) on hardware (hardware.py), by formulas; nothing is run.

Each part of a step is counted as the papers count it, and divided by the hardware's speed:

    products      [n, k] @ [k, m] takes 2 n k m FLOPs, at the fraction of the peak that products of this size reach
    kernels       everything else goes through memory, several times; and a layer of any size has a fixed overhead
    messages      of tensor parallelism: rings over b s h (volumes.py)
    context       of attention over c ranks, as far as blocks of it do not hide them
    experts       their all-to-alls, with the loads of routers that choose evenly
    idle          of the pipeline: the schedule is simulated with these times (`simulate`), or the closed form
    replicas      reduction of gradients, ZeRO's gathering, and waiting for the slowest of d
    optimizer     Adam, over the parameters that a rank owns

Letters as in reference/config.
"""
from collections import Counter
from functools import cache
from math import ceil, inf
from statistics import NormalDist
from typing import NamedTuple

from reference.costs.flops import iteration_flops
from reference.costs.hardware import Hardware, collective_time, slowest_link
from reference.costs.layer_time import NOTHING, Parts, Sizes, StageTime, groups_of, layer, sizes_of
from reference.costs.plans import LayerCounts, Plan, layer_counts
from reference.parallel.stages import schedule_of
from reference.schedules.simulate import Times, simulate

BEFORE = 2      # groups of p microbatches after which a longer step repeats itself
SPAN = 24       # the fewest microbatches over which the repeated part is measured


class StepTime(NamedTuple):
    """Seconds of a step, on the busiest rank: one part after another."""

    products: float
    kernels: float
    messages: float
    context: float
    experts: float
    idle: float
    replicas: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


# ---- a stage --------------------------------------------------------------------------------------------------------


@cache
def embedding(sizes: Sizes, hardware: Hardware) -> StageTime:
    """Time the tables, summed over the vocabulary's shards, and dropout."""
    x = sizes.b * sizes.s * sizes.h
    forward, backward = (hardware.stream(x, passes) for passes in hardware.passes.embedding)
    sent = collective_time(hardware, "all_reduce", sizes.tensor, x * hardware.element_bytes)
    return StageTime(Parts(kernels=forward, messages=sent), Parts(kernels=backward), Parts())


@cache
def head(sizes: Sizes, words: int, predicted: int, transformed: bool, hardware: Hardware) -> StageTime:
    """Time the logits of V/t tokens at the predicted positions, and their cross-entropy, with f's messages: the loss
    sends few elements.

    BERT has a layer before them, outside the region. Its heads for one position count nothing.
    """
    n, h, predicted = sizes.b * sizes.s, sizes.h, sizes.b * predicted
    logits = hardware.product(predicted, h, words)
    if transformed:
        logits += hardware.product(n // (sizes.t if sizes.sequence_parallel else 1), h, h)
    forward, backward = (hardware.stream(predicted * words, passes) for passes in hardware.passes.logits)
    sent = collective_time(hardware, "all_reduce", sizes.tensor, n * h * hardware.element_bytes)
    return StageTime(Parts(logits, forward), Parts(logits, backward, sent), Parts(logits))


def work_of(plan: Plan, hardware: Hardware, held: LayerCounts) -> StageTime:
    """Time a stage, or a rank, with these layers, and perhaps the embedding or the head."""
    sizes, t = sizes_of(plan), plan.parallel.tensor_model_parallel_size
    work = NOTHING.plus(layer(sizes, hardware), held.layers - held.experts)
    if held.experts:
        work = work.plus(layer(sizes_of(plan, experts=True), hardware), held.experts)
    if held.embeds:
        work = work.plus(embedding(sizes, hardware))
    if held.has_logits:
        words, transformed = plan.model.padded_vocab_size(t) // t, plan.model.architecture == "bert"
        predicted = plan.model.most_predicted(sizes.s, plan.parallel.context_parallel_size)
        work = work.plus(head(sizes, words, predicted, transformed, hardware))
    return work


def stage_works(plan: Plan, hardware: Hardware) -> list[StageTime]:
    """Time every stage of a pipeline, in order."""
    held = {stage: layers for stages in plan.pipeline.stages for stage, layers in stages.items()}
    return [work_of(plan, hardware, layer_counts(plan.model, held[stage])) for stage in sorted(held)]


def rank_works(plan: Plan, hardware: Hardware) -> Counter[Parts]:
    """Time the ranks of a pipeline for one microbatch, and count the ranks of each time: most have the same."""
    found = Counter[Parts]()
    for held, ranks in plan.pipeline.kinds.items():
        found[work_of(plan, hardware, held).total] += ranks
    return found


# ---- a step ---------------------------------------------------------------------------------------------------------


def step_time(plan: Plan, hardware: Hardware, closed_form: bool = False) -> StepTime:
    """Time a whole step. The pipeline is simulated action by action, or by its `closed_form`, which is faster."""
    ranks = rank_works(plan, hardware)
    busiest = max(ranks, key=lambda parts: parts.total)
    makespan = (closed_form_makespan if closed_form else played_makespan)(plan, hardware)
    busy = plan.m * busiest.total
    optimizer = plan.owned * hardware.optimizer / hardware.bandwidth
    replicas = replica_messages(plan, hardware)
    before = max(busy, makespan) + replicas + optimizer
    waiting = before * hardware.jitter * slowest_of(plan.parallel.data_parallel_size)
    work = Parts(*(plan.m * part for part in busiest))
    return StepTime(*work, max(0.0, makespan - busy), replicas + waiting, optimizer)


def transfer_time(plan: Plan, hardware: Hardware) -> float:
    """Time the transfer of a stage's result, in t shards that are gathered (Narayanan et al. 2021, section 4.1)."""
    c, p = plan.model, plan.parallel
    if p.pipeline_model_parallel_size == 1:
        return 0.0
    groups, x = groups_of(plan), plan.b * plan.positions * c.hidden_size * hardware.element_bytes
    sent = slowest_link(hardware, groups.pipeline).seconds("send", 2, x / p.sent_parts)
    return sent + (collective_time(hardware, "all_gather", groups.tensor, x) if p.scattered_parts > 1 else 0.0)


def played_makespan(plan: Plan, hardware: Hardware) -> float:
    """Simulate the schedule with these times, for as many microbatches as it takes until the rest repeats itself.

    With equal stages every p more take as long as the p before. With others the time goes up and down with another
    period, of p - 1 microbatches for one, so that more of them are needed for the mean.
    """
    works, p = stage_works(plan, hardware), plan.parallel.pipeline_model_parallel_size
    if len(works) == 1:
        return plan.m * works[0].total.total
    forward, i, w = ([getattr(work, part).total for work in works] for part in StageTime._fields)
    times = Times(forward, i, w, transfer_time(plan, hardware))
    groups, rest, more = *divmod(plan.m, p), ceil(SPAN / p)
    shorter, longer = (simulate(schedule_of(plan.parallel, min(groups, played) * p + rest), times).makespan
                       for played in (BEFORE, BEFORE + more))
    return longer + max(0, groups - BEFORE - more) * (longer - shorter) / more


def closed_form_makespan(plan: Plan, hardware: Hardware) -> float:
    """Return m microbatches of the slowest rank, plus 1/v of one for every other rank (Narayanan et al. 2021, 2.2).

    It holds for 1F1B and its interleaved form. Messages: those of the first microbatch's way to the last stage and
    back. 1F1B waits for 2 more with each microbatch, but for one of every p, which the first rank has ahead;
    interleaved, more is ahead, and nothing waits as long as messages are short compared with a stage's work. With equal
    stages this is exact.
    """
    ranks, p, m = rank_works(plan, hardware), plan.parallel.pipeline_model_parallel_size, plan.m
    v = plan.parallel.virtual_pipeline_size
    slowest, together = max(parts.total for parts in ranks), sum(n * parts.total for parts, n in ranks.items())
    messages = 2 * (p * v - 1) if v else 2 * (p - 1 + m - 1 - ceil((m - 1) / p))
    return m * slowest + (together - slowest) / (v or 1) + messages * transfer_time(plan, hardware)


def exposed(messages: float, work: float, hidden: float) -> float:
    """Return the seconds that messages add to work at the same time: of the shorter of both this share is hidden."""
    return messages - hidden * min(messages, work)


def busiest_microbatch(plan: Plan, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds that the busiest rank computes for a microbatch, forward and backward: without messages."""
    works = (work_of(plan, hardware, held) for held in plan.pipeline.kinds)
    work = max(works, key=lambda one: one.total.total)
    forward, total = (parts.products + parts.kernels for parts in (work.forward, work.total))
    return forward, total - forward


def ring_time(plan: Plan, hardware: Hardware) -> float:
    """Time one way of a rank's parameters around the rings of those that share them: the replicas of an instance, or
    fewer for experts. ZeRO-3 sends each layer by itself.
    """
    groups, sharded = groups_of(plan), plan.parallel.zero_stage == 3
    calls, limit = (len(plan.layers), hardware.sharded.bandwidth) if sharded else (1, inf)
    each = hardware.element_bytes / calls
    return sum(calls * collective_time(hardware, "all_gather", group, parameters * each, limit)
               for group, parameters in ((groups.shards, plan.psi - plan.dealt), (groups.expert_replicas, plan.dealt))
               if parameters)


def replica_messages(plan: Plan, hardware: Hardware) -> float:
    """Time the messages between replicas that no computing hides (volumes.data_parallel_rings counts them all); and
    the sum of a tied table's gradients between the first stage and the last.

    Parameters are gathered beneath a forward. Gradients are summed beneath the last backward, with ZeRO-2 beneath each;
    ZeRO-3 also gathers parameters again for each. Instances sum up their shards beneath the last.
    """
    p, zero, ring = plan.parallel, plan.parallel.zero_stage, ring_time(plan, hardware)
    forward, backward = busiest_microbatch(plan, hardware)
    hidden = hardware.sharded.hidden if zero == 3 else hardware.hidden
    forwards, backwards, each = ((0, 1, 2), (1, 1, 1), (1, plan.m, 1), (plan.m, plan.m, 2))[zero]
    shards = collective_time(hardware, "all_reduce", groups_of(plan).instances, plan.owned * hardware.element_bytes)
    found = (forwards * exposed(ring, forward, hidden) + (backwards - 1) * exposed(each * ring, backward, hidden)
             + exposed(each * ring + shards, backward, hidden))
    if p.pipeline_model_parallel_size > 1 and plan.model.tied:
        groups = groups_of(plan)
        t = p.tensor_model_parallel_size
        table = plan.model.padded_vocab_size(t) // t * plan.model.hidden_size * hardware.element_bytes
        found += slowest_link(hardware, groups.pipeline).seconds("all_reduce", 2, table)
    return found


@cache
def slowest_of(n: int) -> float:
    """Return the expected number of standard deviations from the mean to the slowest of n (Blom 1958)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


# ---- utilization ----------------------------------------------------------------------------------------------------


def flops_of_step(plan: Plan, recompute: str = "none") -> float:
    """Count the FLOPs of a step's matrix products, on all ranks together, with `recompute` included."""
    c, B = plan.model, plan.m * plan.b * plan.parallel.data_parallel_size
    return iteration_flops(c, B, c.max_position_embeddings, recompute)


def flops_per_second(plan: Plan, seconds: float, recompute: str = "none") -> float:
    """Return the FLOP/s that each rank reaches. The papers of 2019 and 2021 count recompute, `full`."""
    return flops_of_step(plan, recompute) / seconds / plan.parallel.world_size
