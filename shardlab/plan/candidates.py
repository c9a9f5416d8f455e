"""All parallelisms of a model on n devices: every (t, p, d, c, e, v, b, ZeRO stage, sequence parallelism, recompute)
that the sizes allow, those that fit into a device's memory, and the fastest of them.
"""
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import gcd, isqrt, prod
from operator import attrgetter
from typing import NamedTuple

from reference.config import (LARGEST, RECOMPUTE, ModelConfig, ParallelConfig, Recompute, check_model_fits,
                              require_positive)
from reference.config.description import describe
from reference.costs.hardware import Hardware
from reference.costs.parameters import parameters
from reference.costs.plans import Plan, PlanMemory
from reference.costs.step_time import StepTime, step_time
from reference.errors import UserError
from reference.parallel.model_states import model_states
from reference.schedules.generators import MOST_ACTIONS
from shardlab.plan.confirmation import precision_of

SIMULATED = 10     # shapes, the fastest by the closed form, whose schedules are simulated
RIVALS = 4      # plans of such a shape, at most, that are simulated if they are
CLOSE = 1.02    # times the fastest one's time: the closed form is that exact for good plans
MOST_B = 64     # samples in a microbatch: more do not speed up products
LEAST_POSITIONS = 4096      # on a context-parallel rank: t, p and d suffice for shorter sequences
PAPERS = (2, 2, 12, 2)      # bytes of a parameter, its gradient and its moments, and of an activation, in the papers

Shape = tuple[int, int, int, int]     # t, p, d and c


class Timed(NamedTuple):
    """A plan, and the time of its step."""

    plan: Plan
    time: StepTime

    @property
    def seconds(self) -> float:
        return self.time.total

    @property
    def shape(self) -> Shape:
        return shape_of(self.plan)


seconds_of = attrgetter("seconds")


def shape_of(plan: Plan) -> Shape:
    p = plan.parallel
    return (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.data_parallel_size,
            p.context_parallel_size)


@dataclass(frozen=True)
class PlanSearch:
    """A model to train and the hardware to train it on. Raises UserError for numbers below 1."""

    model: ModelConfig
    n: int          # devices
    B: int          # samples of a step
    hardware: Hardware
    watch: Callable[..., Iterable] = lambda work, desc: work    # passes on the items of long work, as tqdm does
    predict: Callable[[Plan, Hardware], float] = lambda plan, hardware: 0.0     # bytes on a plan's fullest rank
    shown: int = SIMULATED      # plans, at most, whose memory is predicted

    def __post_init__(self):
        require_positive("num_gpus", self.n)
        require_positive("global_batch_size", self.B)

    @property
    def memory(self) -> float:
        """Return the bytes of a device that a model may use."""
        return self.hardware.memory - self.hardware.reserved

    def needs(self, plan: Plan) -> PlanMemory:
        """Return the memory of the papers' formulas, with our bytes an element: we sum gradients in float32."""
        w, g, k = precision_of(self.hardware).bytes_each
        return PlanMemory(*(size * ours / theirs for size, ours, theirs in zip(plan.memory, (w, g, k, w), PAPERS)))

    def fits(self, plan: Plan) -> bool:
        return sum(self.needs(plan)) <= self.memory

    @cached_property
    def plans(self) -> list[Plan]:
        """Return all plans that the sizes allow."""
        return [plan for shape in shapes(self.model, self.B) if prod(shape) == self.n
                for plan in plans_of(self, *shape)]

    @cached_property
    def fitting(self) -> list[Timed]:
        """Return the plans that fit, timed by the closed form, fastest first."""
        found = []
        for plan in self.watch(self.plans, desc="plans timed"):
            if self.fits(plan):
                found.append(Timed(plan, step_time(plan, self.hardware, closed_form=True)))
        return sorted(found, key=seconds_of)

    @cached_property
    def best(self) -> list[Timed]:
        """Return the fastest plan of each (t, p, d, c), for a limited number of shapes, simulated, fastest first: those
        whose memory is predicted to suffice, too.
        """
        contestants: dict[Shape, list[Timed]] = {}
        for one in self.fitting:
            rivals = contestants.setdefault(one.shape, [])
            if not rivals or len(rivals) < RIVALS and one.seconds < CLOSE * self.fitting[0].seconds:
                rivals.append(one)
        found, simulated = list[Timed](), list(contestants.values())[:SIMULATED]
        for rivals in self.watch(simulated, desc="shapes simulated"):
            found += map(self.simulate, rivals)
        return self.confirm(sorted(found, key=seconds_of))

    def confirm(self, ranked: Sequence[Timed]) -> list[Timed]:
        """Return the first of each shape that is predicted to fit, as many as are to be shown."""
        found: dict[Shape, Timed] = {}
        for one in self.watch(ranked, desc="plans predicted"):
            if (len(found) < self.shown and one.shape not in found
                    and self.predict(one.plan, self.hardware) <= self.memory):
                found[one.shape] = one
        return list(found.values())

    def simulate(self, one: Timed) -> Timed:
        return Timed(one.plan, simulated_time(one.plan, self.hardware))


simulated_time = cache(step_time)


# ---- possible plans -------------------------------------------------------------------------------------------------


def shapes(model: ModelConfig, B: int) -> list[Shape]:
    """Return all (t, p, d, c), on any number of devices, where t shards every tensor evenly, each stage has a layer, d
    divides B, and 2c divides s, and leaves each rank enough positions.
    """
    s, p = model.max_position_embeddings, min(model.num_layers, LARGEST["pipeline_model_parallel_size"])
    contexts = [1, *(c for c in divisors(s // 2) if c > 1 and s % (2 * c) == 0 and s >= c * LEAST_POSITIONS)]
    return list(product(tensor_sizes(model), range(1, p + 1), divisors(B), contexts))


def tensor_sizes(model: ModelConfig) -> list[int]:
    """Return all t that divide the heads, the columns of the MLP and of experts, and fit the groups."""
    return [t for t in divisors(model.num_attention_heads) if fits_model(model, t)]


def fits_model(model: ModelConfig, t: int) -> bool:
    """Report whether t ranks get shards of one size of every tensor."""
    try:
        check_model_fits(model, ParallelConfig(t))
    except UserError:
        return False
    return True


def is_long(model: ModelConfig) -> bool:
    """Report whether sequences are long enough for context parallelism."""
    return model.max_position_embeddings >= 2 * LEAST_POSITIONS


def shape_words(model: ModelConfig) -> str:
    return "t x p x d x c" if is_long(model) else "t x p x d"


def plans_of(job: PlanSearch, t: int, p: int, d: int, c: int) -> Iterator[Plan]:
    """Yield all plans of a shape: 1F1B, and its interleaved form if m is a multiple of p and layers divide evenly."""
    L, s = job.model.num_layers, job.model.max_position_embeddings
    choices = [(way, e) for way in ways(job.model, t, c) for e in expert_sizes(job.model, d * c)]
    for b in (b for b in divisors(job.B // d) if b <= MOST_B):
        m = job.B // (d * b)
        interleaved = [v for v in divisors(L // p) if v > 1] if p > 1 and L % p == 0 and m % p == 0 else []
        for v, zero, sequence, recompute, (way, e) in product(
                [None, *interleaved], range(4 if d * c > 1 else 1),
                (False, True) if t > 1 and s % (c * t) == 0 else (False,), RECOMPUTE, choices):
            if p * max(m, p) * (v or 1) <= MOST_ACTIONS:
                yield Plan(job.model, ParallelConfig(
                    t, p, d, "interleaved" if v else "1f1b", v, zero_stage=zero, sequence_parallel=sequence,
                    recompute=Recompute(recompute), context_parallel_size=c, cp_comm_type=way,
                    expert_model_parallel_size=e), m, b)


def ways(model: ModelConfig, t: int, c: int) -> list[str]:
    """Return the ways of attention over c ranks: the ring, and `a2a` where each of them gets whole heads of keys and
    values. An all-gather sends as much as a ring, and no block of attention hides it: it is never faster.
    """
    return ["p2p", "a2a"] if c > 1 and model.groups % (t * c) == 0 else ["p2p"]


def expert_sizes(model: ModelConfig, replicas: int) -> list[int]:
    """Return all e: they divide the replicas and the experts."""
    return divisors(gcd(replicas, model.experts.num_experts)) if model.experts else [1]


def divisors(n: int) -> list[int]:
    """Return the divisors of n, ascending."""
    small = [i for i in range(1, isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


# ---- no plan --------------------------------------------------------------------------------------------------------


def check(job: PlanSearch) -> None:
    """Raise UserError if no plan is possible, or none fits, with advice."""
    possible = set(map(prod, shapes(job.model, job.B)))
    if job.n not in possible:
        near = sorted(sorted(possible, key=lambda n: (abs(n - job.n), n))[:3])
        raise UserError(
            f"--num-gpus is {job.n}, but no {shape_words(job.model)} gives {job.n}: t must be one of "
            f"{', '.join(map(str, tensor_sizes(job.model)))}, p can be at most --num-layers, "
            f"{job.model.num_layers}, and d must divide --global-batch-size, {job.B}"
            f"{', and 2c --seq-length' * is_long(job.model)}. The nearest "
            f"possible numbers: {', '.join(map(str, near))}.")
    if not job.plans:
        raise UserError(f"--global-batch-size is {job.B}, but the schedule of every plan would have more than "
                        f"{MOST_ACTIONS:,} forwards, of microbatches of at most {MOST_B} samples. Choose a smaller "
                        "one, or one with more divisors.")
    if not job.fitting:
        leanest = min(job.plans, key=lambda plan: sum(job.needs(plan)))
        least = sum(job.needs(leanest))
        raise UserError(
            f"No plan fits: of {len(job.plans):,} the leanest holds {least / 1e9:,.1f} GB on a device "
            f"({in_words(leanest)}), but of a {job.hardware.name} a model gets {job.memory / 1e9:,.0f}. "
            f"{remedy(job)}")
    if not job.best:
        raise UserError(f"By the papers' formulas {len(job.fitting):,} plans fit into {job.memory / 1e9:,.0f} GB, but "
                        "predictions of the fastest find more on a rank. Choose a larger --num-gpus, or a smaller "
                        "model.")


def remedy(job: PlanSearch) -> str:
    """Return a sentence with the nearest number of devices that suffices, if there is one: a device never holds more
    with more replicas.
    """
    found = shapes(job.model, job.B)
    if not any(job.fits(leanest_plan(job, *shape)) for shape in found if shape[2] == job.B):
        return "No number of them would do: choose a smaller model, or a shorter --seq-length."
    states = model_states(parameters(job.model), 1, 0, *precision_of(job.hardware).bytes_each)
    least = sum(states) / job.memory        # all devices together hold these at least once
    near = sorted(((prod(shape), shape) for shape in found if prod(shape) >= least),
                  key=lambda one: (one[0] < job.n, abs(one[0] - job.n)))
    n = next(n for n, shape in near if job.fits(leanest_plan(job, *shape)))
    return f"With --num-gpus {n} one fits."


def leanest_plan(job: PlanSearch, t: int, p: int, d: int, c: int) -> Plan:
    """Return the leanest plan of a shape: ZeRO-3, everything sharded and recomputed, one sample at a time."""
    sequence = t > 1 and job.model.max_position_embeddings % (c * t) == 0
    return Plan(job.model, ParallelConfig(
        t, p, d, zero_stage=3 if d * c > 1 else 0, sequence_parallel=sequence, recompute=Recompute("full"),
        context_parallel_size=c, expert_model_parallel_size=expert_sizes(job.model, d * c)[-1]), job.B // d)


def in_words(plan: Plan) -> str:
    """Describe a plan: `t 8, p 4, d 16, v 2, interleaved, ZeRO-1, full recompute, b 1, m 32`."""
    return f"{describe(plan.parallel)}, b {plan.b}, m {plan.m}"
