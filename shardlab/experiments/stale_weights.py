"""The price of late gradients: `mpirun -np 2 python -m shardlab.experiments.stale_weights`.

A GPT in a pipeline learns to continue sequences of numbers by plain gradient descent, in four ways: with a flush after
every microbatch; with a flush after several, whose gradients are averaged; without a flush, with stashed weights; and
without a flush, with the newest weights (reference/parallel/stale_weights.py). All ways see the same microbatches. What
they gain or lose shows against *time*: here that of the pipeline's ranks, in units of a microbatch's forward and
backward on one rank.

The pipeline is simulated in one process; each rank does one run at a time.
"""
import numpy as np

from mpi_impl.comm.group import world
from mpi_impl.comm.topology import Topology
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group
from reference.batches import GPTBatch
from reference.config import ModelConfig, require_positive
from reference.models.model import model_tensors
from reference.parallel import stale_weights
from reference.parallel.pipeline import pipeline_gradients, split_into_stages
from reference.parallel.stages import layers_of_stage
from reference.params import initialize, tree_map
from reference.schedules.generators import make
from shardlab.experiments.experiment import Experiment, Kind, RunsOptions, each, narrow_model, require_above_zero
from shardlab.experiments.panels import Panel
from shardlab.experiments.training_data import equal_steps

NUMBERS, POSITIONS, SAMPLES = 24, 12, 8         # V, s, b
HIDDEN, HEADS = 32, 2
CHANCE = float(np.log(NUMBERS))                 # the loss of a guess
UNFLUSHED = {f"no flush, {name}": way for name, way in (
    ("stashed weights", stale_weights.STASHED), ("newest weights", stale_weights.NEWEST))}
EACH, SEVERAL, *_ = WAYS = ("a flush after each microbatch", "a flush after several", *UNFLUSHED)


@option_group
class StaleWeightsOptions(RunsOptions):
    """The pipeline and its training."""

    stages: int = option_field(6, "ranks of the pipeline, a layer each", metavar="P", check=require_positive)
    microbatches: int = option_field(480, metavar="M", check=require_positive)
    flush_after: int = option_field(12, "the several microbatches of a step with a flush", metavar="M",
                                    check=require_positive)
    lr: tuple[float, ...] = option_field((0.1, 0.3), "rates of gradient descent (default: 0.1 0.3)", "R",
                                         check=each(require_above_zero))


class StaleWeights(Experiment):
    """Train a GPT in a pipeline with and without flushes, by late gradients and by true ones."""

    name, options = "stale_weights", StaleWeightsOptions
    title, xlabel = "Pipelines with and without a flush, the same microbatches", "time, in microbatches on one rank"
    levels, ylim = {"guesses": CHANCE}, (0, 1.15 * CHANCE)

    def kinds(self) -> dict[Kind, tuple[str, float]]:
        return {Kind(f"rate {lr:g}", way): (way, lr) for lr in self.args.lr for way in WAYS}

    def train(self, kind: tuple[str, float], seed: int, topology: Topology) -> np.ndarray:
        """Return each microbatch's loss, [m]; infinite from the first that is not a number."""
        (way, lr), args = kind, self.args
        c = narrow_model(args.stages, HIDDEN, HEADS, NUMBERS, POSITIONS, init_method_std=0.1,
                         untie_embeddings_and_output_weights=True)
        stages = split_into_stages(initialize(model_tensors(c), seed, np.float64),
                                   [layers_of_stage(i, args.stages, args.stages) for i in range(args.stages)], c)
        rng = np.random.default_rng(seed)
        batches = [GPTBatch.unpack(equal_steps(rng, NUMBERS, SAMPLES, POSITIONS + 1)) for _ in range(args.microbatches)]
        with np.errstate(all="ignore"):
            if way in UNFLUSHED:
                schedule = make("1f1b", args.stages, args.microbatches)
                losses, _, _ = stale_weights.train_without_flush(batches, stages, schedule, c, lr, UNFLUSHED[way])
            else:
                losses = train_with_flush(batches, stages, self.step_of(way), c, lr)
        return np.where(np.logical_or.accumulate(~np.isfinite(losses)), np.inf, losses)

    def step_of(self, way: str) -> int:
        """Return the number of microbatches between two flushes: all of them where there is none."""
        return {EACH: 1, SEVERAL: self.args.flush_after}.get(way, self.args.microbatches)

    def at(self, kind: Kind, points: int) -> np.ndarray:
        """Return when each microbatch has left the pipeline, [m], in units of a microbatch's work on one rank.

        A step of m microbatches takes m + p - 1 units in 1F1B.
        """
        done, step, p = np.arange(points), self.step_of(kind.name), self.args.stages
        return done // step * (step + p - 1) + done % step + p

    def panels(self, results: dict) -> list[Panel]:
        """Show twice the time that a pipeline without a flush takes."""
        shortest = self.at(Kind("", WAYS[-1]), self.args.microbatches)[-1]
        return [panel._replace(xmax=2 * shortest) for panel in super().panels(results)]

    def columns(self, kind: Kind, losses: np.ndarray) -> dict[str, str]:
        m = self.args.microbatches
        updates = -(-m // self.step_of(kind.name)) if kind.name in (EACH, SEVERAL) else m
        return {"time": f"{self.at(kind, m)[-1]:,}", "updates": f"{updates:,}"}

    def note(self, results: dict) -> str:
        return (f"Time is in units of a microbatch's forward and backward on one of {self.args.stages} ranks; "
                f"{self.args.microbatches} microbatches each.\nThe final loss is the mean of the last tenth; a guess "
                f"has ln {NUMBERS} = {CHANCE:.3f}.")


def train_with_flush(batches: list[GPTBatch], stages, microbatches: int, c: ModelConfig, lr: float) -> list[float]:
    """Return each microbatch's loss: the mean over its step, in which nothing moves."""
    losses: list[float] = []
    for first in range(0, len(batches), microbatches):
        step = batches[first:first + microbatches]
        loss, grads = pipeline_gradients(step, stages, make("1f1b", len(stages), len(step)), c)
        stages = [tree_map(lambda weight, grad: weight - lr * grad, *each) for each in zip(stages, grads)]
        losses += [loss] * len(step)
    return losses


if __name__ == "__main__":
    run(lambda: StaleWeights.show(world()))
