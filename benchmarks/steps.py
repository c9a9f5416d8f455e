"""The time of training steps with many plans, each on ranks, on the wall clock or on the virtual one."""
import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from machine import probe, time_probe

from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Trace
from mpi_impl.launch.entry import ArgumentParser
from mpi_impl.launch.pool import Pool
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.rank_environment import cores
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import require_positive
from reference.costs.plans import Plan
from reference.optimizer import OptimizerConfig
from reference.precision import Precision

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
    trainer = Trainer(ModelState(plan.model, topology, 1, Precision("float32")), OptimizerConfig(1e-4, 1))
    shape = plan.b, plan.model.max_position_embeddings
    tokens, targets = np.random.default_rng(0).integers(plan.model.vocab_size, size=(2, *shape))
    batch, found, probes, alone = [GPTBatch(tokens, targets)] * plan.m, [], [], ranks.split(ranks.rank, "one rank")
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


def parse(prog: str, description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse how often to measure, and where to draw it. Raises UserError."""
    p = ArgumentParser(prog=prog, description=description)
    p.add_argument("--turns", type=int, default=3, metavar="N", help="of each plan (default: 3)")
    p.add_argument("--steps", type=int, default=4, metavar="N", help="of each turn (default: 4)")
    p.add_argument("--plot", metavar="FILE", help="draw them there")
    args = p.parse_args(argv)
    for name in ("turns", "steps"):
        require_positive(name, getattr(args, name))
    check_outputs(args)
    return args


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
