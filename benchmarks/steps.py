"""The time of training steps with many plans, each on ranks, on the wall clock or on the virtual one."""
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from machine import probe, time_probe
from models import random_batch, trainer_of

from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Trace
from mpi_impl.launch.pool import Pool
from mpi_impl.runtime.rank_environment import cores
from reference.costs.plans import Plan

WARM = 2        # steps before those that count
LIMIT = 300.0   # seconds that ranks have for a turn


class StepTimes(NamedTuple):
    """Seconds, as medians over steps."""

    step: float     # of the slowest rank
    probe: float    # of machine.py's probe before each step, which tells how fast the machine was then


def step_seconds(ranks: Group, plan: Plan, virtual: bool, steps: int) -> StepTimes:
    """Train with the plan on all of these ranks, in float32."""
    clock = VirtualClock() if virtual else None
    topology = connect(Group(ranks.comm, "world", Instruments(trace=Trace(clock))), plan.parallel)
    trainer, batch = trainer_of(plan.model, topology), [random_batch(plan.model, plan.b)] * plan.m
    found, probes, alone = [], [], ranks.split(ranks.rank, "one rank")
    standard = probe(alone)
    for _ in range(WARM + steps):
        probes.append(median(ranks.allgather_objects(time_probe(ranks, standard))))
        began = together(ranks, clock)
        trainer.step(batch, plan.m * plan.b * plan.parallel.data_parallel_size)
        ended = clock.now() if clock else time.perf_counter()
        found.append(max(ranks.allgather_objects(ended - began)))
    disconnect(topology)
    alone.free()
    return StepTimes(median(found[WARM:]), median(probes[WARM:]))


def together(ranks: Group, clock: VirtualClock | None) -> float:
    """Let all ranks begin a step at the same time, and return that time."""
    if clock is None:
        ranks.allgather_objects(None)
        return time.perf_counter()
    clock.reach(max(ranks.allgather_objects(clock.now())))
    return clock.now()


# ---- many plans, in turn --------------------------------------------------------------------------------------------


OPTIONS = {"plot": "draw them there", "turns": (3, "of each plan"), "steps": (4, "of each turn")}


def measure(plans: Sequence[Plan], turns: int, steps: int, virtual: Sequence[bool],
            before: Callable[[Pool], object] | None = None) -> list[list[StepTimes]]:
    """Measure the step of each plan, by the wall's clock or the virtual one, in each turn.

    `before` is called before each turn with a pool that has a rank for each core, and at least two.
    """
    found: list[list[StepTimes]] = [[] for _ in plans]
    most = max(plan.parallel.world_size for plan in plans)
    with Pool(max(2, cores())) as few, Pool(most) as many:      # one pool sleeps while the other one works
        for turn in range(turns):
            print(f"turn {turn + 1} of {turns}", end=" ", flush=True)
            if before:
                before(few)
            for plan, fake, times in zip(plans, virtual, found, strict=True):
                times += (many if fake else few).run(plan.parallel.world_size, step_seconds, plan, fake, steps,
                                                     timeout=LIMIT)[:1]
                print(".", end="", flush=True)
            print()
    return found
