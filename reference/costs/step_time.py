"""How long a step takes: a plan (plans.py) on hardware (hardware.py), by formulas; nothing is run.

Each part of a step is counted as the papers count it, and divided by what the hardware does in a second:

    products      [n, k] @ [k, m] takes 2 n k m FLOPs, at the share of the peak that products of this size reach
    kernels       what is no product goes through memory, some times; and a layer takes some time however small it is
    messages      of tensor parallelism: rings over b s h (volumes.py)
    idle          of the pipeline: the schedule is played with these times (`simulate`), or the closed form
    replicas      reduction of gradients, ZeRO's gathering, and waiting for the slowest of d
    optimizer     Adam, over the parameters that a rank owns

Letters as in reference/config.py.
"""
from collections import Counter
from functools import cache
from math import ceil
from statistics import NormalDist
from typing import NamedTuple

from reference.costs.flops import iteration_flops
from reference.costs.hardware import Group, Hardware, collective, slowest_link
from reference.costs.plans import Plan
from reference.costs.volumes import data_parallel_rings
from reference.parallel.stages import schedule_of
from reference.schedules.simulate import Times, simulate

BEFORE = 2      # groups of p microbatches, of a longer step, after which the rest repeats itself
SPAN = 24       # microbatches, at least, over which it is seen how long it takes


class Parts(NamedTuple):
    """Seconds of a rank's work on one microbatch, or of several."""

    products: float = 0.0
    kernels: float = 0.0      # and all that is neither product nor message
    messages: float = 0.0     # between tensor-parallel ranks

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, other: "Parts", times: float = 1) -> "Parts":
        return Parts(*(a + times * b for a, b in zip(self, other, strict=True)))


class Work(NamedTuple):
    """Of a stage, for one microbatch."""

    forward: Parts
    input_gradient: Parts     # with what is recomputed before it
    weight_gradient: Parts

    @property
    def total(self) -> Parts:
        return self.forward.plus(self.input_gradient).plus(self.weight_gradient)

    def plus(self, other: "Work", times: float = 1) -> "Work":
        return Work(*(a.plus(b, times) for a, b in zip(self, other, strict=True)))


NOTHING = Work(Parts(), Parts(), Parts())


class StepTime(NamedTuple):
    """Seconds of a step, on the busiest rank: one part after another."""

    products: float
    kernels: float
    messages: float
    idle: float
    replicas: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


# ---- a layer --------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """What the time of a layer depends on, so that plans which share it need it counted once."""

    b: int
    s: int
    h: int
    a: int
    t: int
    sequence_parallel: bool
    keep_gathered_inputs: bool
    recompute: str
    tensor: Group       # of the t ranks that share a layer


def sizes_of(plan: Plan) -> Sizes:
    c, p = plan.model, plan.parallel
    return Sizes(plan.b, c.max_position_embeddings, c.hidden_size, c.num_attention_heads,
                 p.tensor_model_parallel_size, p.sequence_parallel, p.keep_gathered_inputs, p.recompute.granularity,
                 groups_of(plan).tensor)


class Groups(NamedTuple):
    """Ranks count through t first, then d, then p."""

    tensor: Group
    data: Group
    pipeline: Group


def groups_of(plan: Plan) -> Groups:
    p, n = plan.parallel, plan.parallel.world_size
    t, d, stages = p.tensor_model_parallel_size, p.data_parallel_size, p.pipeline_model_parallel_size
    return Groups(Group(t, 1, n), Group(d, t, n), Group(stages, t * d, n))


@cache
def layer(sizes: Sizes, hardware: Hardware) -> Work:
    """Forward and backward of one layer and microbatch."""
    forward, (core, scores) = layer_forward(sizes, hardware), attention_core(sizes, hardware, backward=False)
    products = linear_products(sizes, hardware)
    core_back, scores_back = attention_core(sizes, hardware, backward=True)
    backward = Parts(products + core_back, elementwise(sizes, hardware, backward=True) + scores_back,
                     region_messages(sizes, hardware, backward=True))
    again = {"none": Parts(), "selective": Parts(core, scores), "full": forward}[sizes.recompute]
    return Work(forward, backward.plus(again), Parts(products=products))


def layer_forward(sizes: Sizes, hardware: Hardware) -> Parts:
    core, scores = attention_core(sizes, hardware, backward=False)
    return Parts(linear_products(sizes, hardware) + core, elementwise(sizes, hardware, backward=False) + scores,
                 region_messages(sizes, hardware, backward=False))


def linear_products(sizes: Sizes, hardware: Hardware) -> float:
    """Of Q, K and V; attention's output; the two matrices of the MLP. Each of the two gradients takes as long."""
    n, h, t = sizes.b * sizes.s, sizes.h, sizes.t
    return sum(hardware.product(n, k, m)
               for k, m in ((h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h)))


def attention_core(sizes: Sizes, hardware: Hardware, backward: bool) -> tuple[float, float]:
    """q k^T and the probabilities times v: 4 b s^2 h/t FLOPs forward, twice that backward; and softmax."""
    b, s, h, a, t = sizes[:5]
    flops = (1 + backward) * 4 * b * s**2 * h / t
    return (flops / (hardware.peak * hardware.attention[backward]),
            hardware.stream(b * a * s**2 / t, hardware.passes.scores[backward]))


def elementwise(sizes: Sizes, hardware: Hardware, backward: bool) -> float:
    """Outside the regions on every rank, unless the sequence is cut; inside by columns."""
    x = sizes.b * sizes.s * sizes.h
    outside = x / (sizes.t if sizes.sequence_parallel else 1)
    return (hardware.stream(outside, hardware.passes.outside[backward])
            + hardware.stream(x / sizes.t, hardware.passes.inside[backward]) + hardware.overhead[backward])


def region_messages(sizes: Sizes, hardware: Hardware, backward: bool) -> float:
    """Two all-reduces of b s h each way (Shoeybi et al. 2019, figure 4). With sequence parallelism each is cut in two
    halves, and the backward gathers the two inputs again unless they are kept (Korthikanti et al. 2022, section 4.2.2).
    """
    x = sizes.b * sizes.s * sizes.h * hardware.element_bytes
    if not sizes.sequence_parallel:
        return 2 * collective(hardware, "all_reduce", sizes.tensor, x)
    gathered = collective(hardware, "all_gather", sizes.tensor, x)
    halves = 2 * (gathered + collective(hardware, "reduce_scatter", sizes.tensor, x))
    return halves + (2 * gathered if backward and not sizes.keep_gathered_inputs else 0)


# ---- a stage --------------------------------------------------------------------------------------------------------


@cache
def embedding(sizes: Sizes, hardware: Hardware) -> Work:
    """The tables, summed over the vocabulary's shards, and dropout."""
    x = sizes.b * sizes.s * sizes.h
    forward, backward = (hardware.stream(x, passes) for passes in hardware.passes.embedding)
    sent = collective(hardware, "all_reduce", sizes.tensor, x * hardware.element_bytes)
    return Work(Parts(kernels=forward, messages=sent), Parts(kernels=backward), Parts())


@cache
def head(sizes: Sizes, words: int, transformed: bool, hardware: Hardware) -> Work:
    """Logits of V/t words, and their cross-entropy. Of its messages only f's counts: the loss has a number a token.

    BERT has a layer before them, which stands outside the region. Of its heads for one position there is nothing.
    """
    n, h = sizes.b * sizes.s, sizes.h
    logits = hardware.product(n, h, words)
    if transformed:
        logits += hardware.product(n // (sizes.t if sizes.sequence_parallel else 1), h, h)
    forward, backward = (hardware.stream(n * words, passes) for passes in hardware.passes.logits)
    sent = collective(hardware, "all_reduce", sizes.tensor, n * h * hardware.element_bytes)
    return Work(Parts(logits, forward), Parts(logits, backward, sent), Parts(logits))


def work_of(plan: Plan, hardware: Hardware, layers: int, first: bool, last: bool) -> Work:
    """Of a stage, or a rank, with so many layers, and perhaps the model's beginning or its end."""
    sizes, t = sizes_of(plan), plan.parallel.tensor_model_parallel_size
    work = NOTHING.plus(layer(sizes, hardware), layers)
    if first:
        work = work.plus(embedding(sizes, hardware))
    if last:
        words, transformed = plan.model.padded_vocab_size(t) // t, plan.model.architecture == "bert"
        work = work.plus(head(sizes, words, transformed, hardware))
    return work


def stage_works(plan: Plan, hardware: Hardware) -> list[Work]:
    """Of every stage of a pipeline, in order."""
    held = {stage: layers for stages in plan.pipeline.stages for stage, layers in stages.items()}
    return [work_of(plan, hardware, len(held[stage]), stage == 0, stage == len(held) - 1) for stage in sorted(held)]


def rank_works(plan: Plan, hardware: Hardware) -> Counter[Parts]:
    """Of the ranks of a pipeline, for one microbatch, and how many have it: most are alike."""
    found = Counter[Parts]()
    for (layers, first, last), ranks in plan.pipeline.kinds.items():
        found[work_of(plan, hardware, layers, first, last).total] += ranks
    return found


# ---- a step ---------------------------------------------------------------------------------------------------------


def step_time(plan: Plan, hardware: Hardware, closed_form: bool = False) -> StepTime:
    """Of a whole step. The pipeline is played action by action, or taken from its `closed_form`, which is faster."""
    ranks = rank_works(plan, hardware)
    busiest = max(ranks, key=lambda parts: parts.total)
    makespan = (closed_form_makespan if closed_form else played_makespan)(plan, hardware)
    busy = plan.m * busiest.total
    optimizer = plan.owned * hardware.optimizer / hardware.bandwidth
    replicas = replica_messages(plan, hardware)
    before = max(busy, makespan) + replicas + optimizer
    waiting = before * hardware.jitter * slowest_of(plan.parallel.data_parallel_size)
    products, kernels, messages = (plan.m * part for part in busiest)
    return StepTime(products, kernels, messages, max(0.0, makespan - busy), replicas + waiting, optimizer)


def sending(plan: Plan, hardware: Hardware) -> float:
    """Of a stage's result: each of t ranks sends its part, which then is gathered (Narayanan et al. 2021, sec. 4.1)."""
    c, p = plan.model, plan.parallel
    if p.pipeline_model_parallel_size == 1:
        return 0.0
    groups, x = groups_of(plan), plan.b * c.max_position_embeddings * c.hidden_size * hardware.element_bytes
    sent = slowest_link(hardware, groups.pipeline).seconds("send", 2, x / p.sent_parts)
    return sent + (collective(hardware, "all_gather", groups.tensor, x) if p.scattered_parts > 1 else 0.0)


def played_makespan(plan: Plan, hardware: Hardware) -> float:
    """Of the schedule with these times. Of many microbatches so many are played that the rest repeats what was there.

    With equal stages every p more take as long as the p before. With others the time goes up and down with another
    period, of p - 1 microbatches for one, so that more of them are needed for the mean.
    """
    works, p = stage_works(plan, hardware), plan.parallel.pipeline_model_parallel_size
    if len(works) == 1:
        return plan.m * works[0].total.total
    forward, i, w = ([getattr(work, part).total for work in works] for part in Work._fields)
    times = Times(forward, i, w, sending(plan, hardware))
    groups, rest, more = *divmod(plan.m, p), ceil(SPAN / p)
    shorter, longer = (simulate(schedule_of(plan.parallel, min(groups, some) * p + rest), times).makespan
                       for some in (BEFORE, BEFORE + more))
    return longer + max(0, groups - BEFORE - more) * (longer - shorter) / more


def closed_form_makespan(plan: Plan, hardware: Hardware) -> float:
    """m microbatches of the slowest rank; every other rank adds 1/v of one (Narayanan et al. 2021, section 2.2). Of
    1F1B and its interleaved form.

    And messages: those of the first microbatch's way to the last stage and back. 1F1B waits for 2 more with each
    microbatch, but for one of every p, which the first rank has ahead; interleaved there is more ahead, and nothing
    waits as long as messages are short beside a stage's work. With equal stages this is exact.
    """
    ranks, p, m = rank_works(plan, hardware), plan.parallel.pipeline_model_parallel_size, plan.m
    v = plan.parallel.virtual_pipeline_size
    slowest, together = max(parts.total for parts in ranks), sum(n * parts.total for parts, n in ranks.items())
    messages = 2 * (p * v - 1) if v else 2 * (p - 1 + m - 1 - ceil((m - 1) / p))
    return m * slowest + (together - slowest) / (v or 1) + messages * sending(plan, hardware)


def replica_messages(plan: Plan, hardware: Hardware) -> float:
    """Of gradients and parameters between d replicas (`data_parallel_rings`), less what is hidden
    behind the backward; and the sum of a tied table's gradients between the first stage and the last.
    """
    p, groups = plan.parallel, groups_of(plan)
    size, rings = plan.psi * hardware.element_bytes, data_parallel_rings(p.zero_stage, plan.m)
    found = (1 - hardware.hidden) * rings * collective(hardware, "all_gather", groups.data, size)
    if p.pipeline_model_parallel_size > 1 and plan.model.tied:
        t = p.tensor_model_parallel_size
        table = plan.model.padded_vocab_size(t) // t * plan.model.hidden_size * hardware.element_bytes
        found += slowest_link(hardware, groups.pipeline).seconds("all_reduce", 2, table)
    return found


@cache
def slowest_of(n: int) -> float:
    """By how many standard deviations the slowest of n is behind the mean, as is expected (Blom 1958)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25)) if n > 1 else 0.0


# ---- what it comes to -----------------------------------------------------------------------------------------------


def flops_of_step(plan: Plan, recompute: str = "none") -> float:
    """Of the matrix products of a step, on all ranks together; with what is computed again, if so."""
    c, B = plan.model, plan.m * plan.b * plan.parallel.data_parallel_size
    return iteration_flops(c, B, c.max_position_embeddings, recompute)


def flops_per_second(plan: Plan, seconds: float, recompute: str = "none") -> float:
    """That each rank reaches. The papers of 2019 and 2021 count what is recomputed, `full`."""
    return flops_of_step(plan, recompute) / seconds / plan.parallel.world_size
