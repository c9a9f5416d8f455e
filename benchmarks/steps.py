"""The time of a training step on ranks, by the wall's clock or by the virtual one."""
import time
from statistics import median
from typing import NamedTuple

import numpy as np
from machine import probe, probed

from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Trace
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.optimizer import OptimizerConfig
from reference.plans import Plan
from reference.precision import Precision

WARM = 2        # steps before those that count


class Measured(NamedTuple):
    """Seconds: medians over steps."""

    step: float     # of the slowest rank
    probe: float    # of machine.py's probe before each step, which tells how fast the machine was then


def step_seconds(ranks: Group, plan: Plan, virtual: bool, steps: int) -> Measured:
    """Train by the plan on all of these ranks, in float32."""
    clock = VirtualClock() if virtual else None
    topology = connect(Group(ranks.comm, "world", Instruments(trace=Trace(clock))), plan.parallel)
    trainer = Trainer(plan.model, OptimizerConfig(1e-4, 1), topology, 1, Precision("float32"))
    shape = plan.b, plan.model.max_position_embeddings
    tokens, targets = np.random.default_rng(0).integers(plan.model.vocab_size, size=(2, *shape))
    batch, found, probes, alone = [GPTBatch(tokens, targets)] * plan.m, [], [], ranks.part(ranks.rank, "one rank")
    standard = probe(alone)
    for _ in range(WARM + steps):
        probes.append(median(ranks.from_all(probed(ranks, standard))))
        began = together(ranks, clock)
        trainer.step(batch, plan.m * plan.b * plan.parallel.data_parallel_size)
        ended = clock.now() if clock else time.perf_counter()
        found.append(max(ranks.from_all(ended - began)))
    disconnect(topology)
    alone.free()
    return Measured(median(found[WARM:]), median(probes[WARM:]))



def together(ranks: Group, clock: VirtualClock | None) -> float:
    """All begin a step at one time -> what time it is."""
    if clock is None:
        ranks.from_all(None)
        return time.perf_counter()
    clock.reach(max(ranks.from_all(clock.now())))
    return clock.now()
