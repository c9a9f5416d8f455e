"""The time of a training step with a plan, on ranks, by the wall clock or the virtual one."""
import time
from statistics import median
from typing import NamedTuple

from machine import probe, time_probe
from models import random_batch, trainer_of

from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Trace
from reference.costs.plans import Plan

WARM = 2        # steps before those that count


class StepTimes(NamedTuple):
    """Seconds, as medians over steps."""

    step: float     # of the slowest rank
    probe: float    # of machine.py's probe before each step, which tells how fast the machine was then


def step_seconds(ranks: Group, plan: Plan, virtual: bool, steps: int) -> StepTimes:
    """Train with the plan on all of these ranks, in float32."""
    clock = VirtualClock() if virtual else None
    topology = connect(Group(ranks.comm, "world", Instruments(trace=Trace(clock))), plan.parallel)
    trainer, batch = trainer_of(plan.model, topology), [random_batch(plan.model, plan.b)] * plan.m
    times, probes, alone = [], [], ranks.split(ranks.rank, "one rank")
    standard = probe(alone)
    for _ in range(WARM + steps):
        probes.append(median(ranks.allgather_objects(time_probe(ranks, standard))))
        began = together(ranks, clock)
        trainer.step(batch, plan.m * plan.b * plan.parallel.data_parallel_size)
        ended = clock.now() if clock else time.perf_counter()
        times.append(max(ranks.allgather_objects(ended - began)))
    disconnect(topology)
    alone.free()
    return StepTimes(median(times[WARM:]), median(probes[WARM:]))


def together(ranks: Group, clock: VirtualClock | None) -> float:
    """Let all ranks begin a step at the same time, and return that time."""
    if clock is None:
        ranks.allgather_objects(None)
        return time.perf_counter()
    clock.reach(max(ranks.allgather_objects(clock.now())))
    return clock.now()
