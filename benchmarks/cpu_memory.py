"""The memory that a rank takes, beside the forecast.

    for n in 1 2 8; do .venv/bin/python -m mpi_impl.launch -n $n benchmarks/cpu_memory.py; done

Each rank notes its resident bytes when all is imported and MPI is up, takes three steps of the work "h512" (works.py),
and asks the system for the most that it ever had. The difference is compared with the forecast of a run on arrays
without data (mpi_impl/prediction): parameters, gradients, Adam's moments, and activations at their peak. Memory that
ranks share counts for each of them.
"""
import numpy as np
from works import WORKS

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import connect
from mpi_impl.launch.entry import run
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.prediction.predict import predict_alone
from mpi_impl.prediction.rank import ImaginedWorld
from mpi_impl.report.forecast import Forecast, forecast_of
from mpi_impl.report.resident_memory import ResidentMemory
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ModelConfig, ParallelConfig
from reference.optimizer import OptimizerConfig
from reference.params import HOST
from reference.precision import Precision

STEPS = 3


def main() -> None:
    ranks, work = world(), WORKS["h512"]
    ranks.allgather_objects(None)
    resident = ResidentMemory(HOST)
    model = ModelConfig(work.L, work.h, work.a, work.V, work.s, hidden_dropout=0.0, attention_dropout=0.0)
    parallel, precision = ParallelConfig(tensor_model_parallel_size=ranks.size), Precision("float32")
    optimizer = OptimizerConfig(lr=1e-4, lr_decay_iters=1, lr_decay_style="constant")
    trainer = Trainer(ModelState(model, connect(ranks, parallel), 1, precision), optimizer)
    tokens, targets = np.random.default_rng(0).integers(work.V, size=(2, work.b, work.s))
    for _ in range(STEPS):
        trainer.step([GPTBatch(tokens, targets)], work.b)
    (predicted,) = predict_alone(ImaginedWorld(model, parallel, precision, work.b, work.s, microbatches=1))
    report(ranks, resident.bytes, forecast_of(predicted.held))


def report(ranks: Group, took: int, forecast: Forecast) -> None:
    most = max(ranks.allgather_objects(took))
    if ranks.rank == 0:
        parts = ", ".join(f"{part} {size / 1e6:.0f} MB" for part, size in forecast._asdict().items())
        print(f"t = {ranks.size}: {parts}, together {forecast.total / 1e6:.0f} MB; the fullest rank took "
              f"{most / 1e6:.0f} MB, {most / forecast.total:.2f} times as much")


if __name__ == "__main__":
    run(main)
