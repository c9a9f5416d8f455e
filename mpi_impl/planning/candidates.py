"""All ways to share a model out over n devices: every (t, p, d, v, b, ZeRO stage, sequence parallelism, recompute) that
the sizes allow, those that fit into a device's memory, and the fastest of these.
"""
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

from reference.config import RECOMPUTE, ModelConfig, ParallelConfig, Recompute, require_positive
from reference.errors import UserError
from reference.hardware import Hardware
from reference.plans import Plan
from reference.step_time import StepTime, step_time

PLAYED = 10     # shapes, the fastest by the closed form, whose schedules are played action by action
MOST_B = 64     # samples in a microbatch: more make products no faster


class Timed(NamedTuple):
    """A plan, and how long a step takes by it."""

    plan: Plan
    time: StepTime

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def shape(self) -> tuple[int, int, int]:
        """t, p and d."""
        return shape_of(self.plan)


def shape_of(plan: Plan) -> tuple[int, int, int]:
    p = plan.parallel
    return p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.data_parallel_size


@dataclass(frozen=True)
class Job:
    """What is to be trained, and on what. Raises UserError for numbers below 1."""

    model: ModelConfig
    n: int          # devices
    B: int          # samples of a step
    hardware: Hardware

    def __post_init__(self):
        require_positive("num_gpus", self.n)
        require_positive("global_batch_size", self.B)

    @property
    def memory(self) -> float:
        """Bytes of a device that a model may have."""
        return self.hardware.memory - self.hardware.reserved

    def fits(self, plan: Plan) -> bool:
        return sum(plan.memory) <= self.memory

    @cached_property
    def plans(self) -> list[Plan]:
        """All that the sizes allow."""
        return [plan for t, p, d in shapes(self.model, self.n, self.B) for plan in plans_of(self, t, p, d)]

    @cached_property
    def fitting(self) -> list[Timed]:
        """Those that fit, by the closed form, fastest first."""
        fitting = filter(self.fits, self.plans)
        found = [Timed(plan, step_time(plan, self.hardware, closed_form=True)) for plan in fitting]
        return sorted(found, key=lambda one: one.seconds)

    @cached_property
    def best(self) -> list[Timed]:
        """The fastest of each (t, p, d), of so many, fastest first: their schedules have been played."""
        found: dict[tuple[int, int, int], Timed] = {}
        for one in self.fitting:
            found.setdefault(one.shape, one)
        played = [self.played(one) for one in list(found.values())[:PLAYED]]
        return sorted(played, key=lambda one: one.seconds)

    def played(self, one: Timed) -> Timed:
        return Timed(one.plan, played_time(one.plan, self.hardware))


@cache
def played_time(plan: Plan, hardware: Hardware) -> StepTime:
    return step_time(plan, hardware)


# ---- what the sizes allow -------------------------------------------------------------------------------------------


def shapes(model: ModelConfig, n: int, B: int) -> list[tuple[int, int, int]]:
    """(t, p, d): t divides the heads, every stage has a layer, every replica has as many samples."""
    return [(t, p, n // (t * p)) for t in divisors(n) if model.num_attention_heads % t == 0
            for p in divisors(n // t) if p <= model.num_layers and B % (n // (t * p)) == 0]


def plans_of(job: Job, t: int, p: int, d: int) -> Iterator[Plan]:
    """All of a shape: 1F1B, and where m is a multiple of p and layers divide evenly, its interleaved form."""
    L, s = job.model.num_layers, job.model.max_position_embeddings
    for b in (b for b in divisors(job.B // d) if b <= MOST_B):
        m = job.B // (d * b)
        interleaved = [v for v in divisors(L // p) if v > 1 and L % p == 0] if p > 1 and m % p == 0 else []
        for v, zero, cut, recompute in product([None, *interleaved], range(4 if d > 1 else 1),
                                               (False, True) if t > 1 and s % t == 0 else (False,), RECOMPUTE):
            yield Plan(job.model, ParallelConfig(t, p, d, "interleaved" if v else "1f1b", v, zero_stage=zero,
                                                 sequence_parallel=cut, recompute=Recompute(recompute)), m, b)


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


# ---- where there is none --------------------------------------------------------------------------------------------


def check(job: Job) -> None:
    """Raises UserError if no plan is possible, or none fits; it says what would make it so."""
    if not job.plans:
        near = [n for n in sorted(range(1, 2 * job.n + 1), key=lambda n: (abs(n - job.n), n))
                if shapes(job.model, n, job.B)][:3]
        raise UserError(
            f"--num-gpus is {job.n}, which is t x p x d in no way: t must divide --num-attention-heads, "
            f"{job.model.num_attention_heads}, p can be at most --num-layers, {job.model.num_layers}, and d must "
            f"divide --global-batch-size, {job.B}. The nearest numbers that are: {', '.join(map(str, sorted(near)))}.")
    if not job.fitting:
        leanest = min(job.plans, key=lambda plan: sum(plan.memory))
        raise UserError(
            f"No plan fits: of {len(job.plans):,} the leanest holds {sum(leanest.memory) / 1e9:,.1f} GB on a device "
            f"({described(leanest)}), but of a {job.hardware.name} a model gets {job.memory / 1e9:,.0f}. "
            f"{remedy(job)}")


def remedy(job: Job) -> str:
    """How many devices would do, if any number would."""
    n = job.n
    while n < 1_000_000:
        n *= 2
        if any(job.fits(plan) for plan in leanest_plans(Job(job.model, n, job.B, job.hardware))):
            return f"With --num-gpus {n} one fits."
    return "No number of them would do: choose a smaller model, or a shorter --seq-length."


def leanest_plans(job: Job) -> Iterator[Plan]:
    """Of each shape the one that holds least: ZeRO-3, all cut, all recomputed, one sample at a time."""
    for t, p, d in shapes(job.model, job.n, job.B):
        cut = t > 1 and job.model.max_position_embeddings % t == 0
        yield Plan(job.model, ParallelConfig(t, p, d, zero_stage=3 if d > 1 else 0, sequence_parallel=cut,
                                             recompute=Recompute("full")), job.B // d)


def described(plan: Plan) -> str:
    """`t = 8, p = 4, d = 16, b = 1, m = 32, v = 2, ZeRO-1, sequence parallel, full recompute`."""
    p = plan.parallel
    found = [f"t = {p.tensor_model_parallel_size}, p = {p.pipeline_model_parallel_size}, d = {p.data_parallel_size}, "
             f"b = {plan.b}, m = {plan.m}"]
    found += [f"v = {p.virtual_pipeline_size}"] if p.virtual_pipeline_size else []
    found += [f"ZeRO-{p.zero_stage}"] if p.zero_stage else []
    found += ["sequence parallel"] if p.sequence_parallel else []
    found += [f"{p.recompute.granularity} recompute"] if p.recompute.granularity != "none" else []
    return ", ".join(found)
