"""A step with Muon beside one with Adam, on two ranks which take them in turns.

    .venv/bin/python -m mpi_impl.launch -n 2 benchmarks/optimizers.py
"""
import time
from statistics import median

from benchmarks.models import gpt, random_batch
from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import connect
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.config import ParallelConfig
from reference.optimizer import OptimizerConfig
from reference.precision import Precision

MODEL, SAMPLES, TURNS = gpt(4, 256, 8, 4096, 128), 8, 9
PLACES = {"t = 2": (2, 0), "d = 2": (1, 0), "d = 2, ZeRO-1": (1, 1)}
OPTIMIZERS = {"Adam": {}, "Muon, duplicated": {"optimizer": "muon"},
              "Muon, distributed": {"optimizer": "muon", "muon_tp_mode": "distributed"}}


def trainer_of(group: Group, t: int, stage: int, choices: dict) -> Trainer:
    config = OptimizerConfig(1e-3, 1, lr_decay_style="constant", **choices)
    parallel = ParallelConfig.for_world(group.size, t, zero_stage=stage, whole_matrices=config.muon)
    return Trainer(ModelState(MODEL, connect(group, parallel), 1, Precision("float32")), config)


def seconds_of_steps(group: Group, t: int, stage: int) -> dict[str, float]:
    """Return the median seconds of a step with each optimizer, after one that warms up."""
    trainers = {name: trainer_of(group, t, stage, choices) for name, choices in OPTIMIZERS.items()}
    batch, times = random_batch(MODEL, SAMPLES * t // group.size), {name: list[float]() for name in trainers}
    for _ in range(TURNS + 1):
        for name, trainer in trainers.items():
            group.comm.Barrier()
            began = time.perf_counter()
            trainer.step([batch], SAMPLES)
            times[name].append(time.perf_counter() - began)
    return {name: median(found[1:]) for name, found in times.items()}


if __name__ == "__main__":
    ranks = world()
    for place, (t, stage) in PLACES.items():
        found = seconds_of_steps(ranks, t, stage)
        if ranks.rank == 0:
            print(f"| {place} | " + " | ".join(f"{1000 * found[name]:.0f} ms ({found[name] / found['Adam']:.2f})"
                                               for name in OPTIMIZERS) + " |", flush=True)
