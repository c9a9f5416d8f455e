"""The price of large batches: `mpirun -np 2 python -m shardlab.experiments.batch_size`.

Data parallelism divides a batch over replicas, so more replicas need a larger batch. A larger batch has a less noisy
gradient, which permits a larger rate, and fewer steps reach the same loss. While twice the batch needs half the steps,
twice the replicas need half the time. That ends: a gradient without noise still needs its steps (Shallue et al. 2019).
McCandlish et al. 2018 (equation 2.11) describe it by two numbers, the fewest steps and the fewest samples:

    (steps / fewest steps - 1) (samples / fewest samples - 1) = 1

This experiment counts the steps that a small GPT needs to reach a given validation loss on the bytes of Python's own
standard library, for batches of 1, 2, 4 ... samples. For each batch size the rate is the best of a few: the one whose
median over the seeds is least.

Each rank does one run at a time. The result does not depend on the number of ranks.
"""
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.comm.group import world
from mpi_impl.comm.topology import Topology
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group
from mpi_impl.runtime.tables import aligned, count
from reference.config import require_positive
from shardlab.experiments.experiment import (Experiment, Kind, RunsOptions, each, narrow_model, require_above_zero,
                                             spread, trainer_of)
from shardlab.experiments.panels import Panel
from shardlab.experiments.training_data import BYTES, gpt_batch, read_text

LAYERS, HIDDEN, HEADS, POSITIONS = 1, 32, 2, 32             # s last
WARMUP = 10                                                 # steps
EVALUATED, EVERY = 256, 0.05    # samples of an evaluation, always the same; steps from one to the next, as a share


@option_group
class BatchSizeOptions(RunsOptions):
    """The batches and the loss to reach."""

    batch_size: tuple[int, ...] = option_field((1, 2, 4, 8, 16, 32, 64, 128), "(default: 1 2 4 ... 128)", "B",
                                               check=each(require_positive))
    loss: float = option_field(2.5, "the validation loss to reach, nats a byte", check=require_above_zero)
    lr: tuple[float, ...] = option_field((1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), "rates to choose from", "R",
                                         check=each(require_above_zero))
    max_steps: int = option_field(3000, "after which a run is given up", "N", check=require_positive)
    max_samples: int = option_field(20_000, "after which a run is given up", "N", check=require_positive)


class Measured(NamedTuple):
    """The best rate for a batch size, and the steps of its runs, [seeds]."""

    lr: float
    steps: np.ndarray

    @property
    def median(self) -> float:
        return float(np.median(self.steps))


class BatchSize(Experiment):
    """Count the steps that batches of several sizes need to reach a loss."""

    name, options = "batch_size", BatchSizeOptions
    title, ylabel = "What a batch of twice the size saves, and what it costs", "to the validation loss"

    def __init__(self, args: Any):
        super().__init__(args)
        self.text = read_text()

    def kinds(self) -> dict[Kind, tuple[int, float]]:
        return {Kind(f"batch of {b}", f"rate {lr:g}"): (b, lr)
                for b in sorted(self.args.batch_size) for lr in sorted(self.args.lr)}

    def train(self, kind: tuple[int, float], seed: int, topology: Topology) -> np.ndarray:
        """Return after how many steps the loss was reached, [1]; infinite if it was not within the limit."""
        (b, lr), args = kind, self.args
        limit = max(1, min(args.max_steps, args.max_samples // b))
        model = narrow_model(LAYERS, HIDDEN, HEADS, BYTES, POSITIONS, init_method_std=0.05)
        trainer = trainer_of(model, topology, seed, lr, limit, lr_decay_style="constant", lr_warmup_iters=WARMUP)
        rng = np.random.default_rng(seed)
        unseen = gpt_batch(self.text.validation, np.random.default_rng(0), EVALUATED, POSITIONS)
        evaluation = 1
        for step in range(1, limit + 1):
            with np.errstate(all="ignore"):
                trainer.step([gpt_batch(self.text.training, rng, b, POSITIONS)], b)
                if step == evaluation:
                    if trainer.evaluate([unseen], EVALUATED)[0] <= args.loss:
                        return np.array([float(step)])
                    evaluation = max(step + 1, int((1 + EVERY) * step))
        return np.array([np.inf])

    def best(self, results: dict[Kind, np.ndarray]) -> dict[int, Measured]:
        """Return for each batch size the rate with the least median over the seeds."""
        found = dict[int, Measured]()
        for kind, (b, lr) in self.kinds().items():
            measured = Measured(lr, results[kind][:, 0])
            if b not in found or measured.median < found[b].median:
                found[b] = measured
        return found

    def table(self, results: dict) -> str:
        best = self.best(results)
        median = medians(best)
        shares = {2 * b: f"{median[2 * b] / steps:.0%}" for b, steps in median.items() if 2 * b in median}
        rows = [{"batch": f"{b:,}", "rate": f"{one.lr:g}"} | spread("steps: median", one.steps, ",.0f")
                | {"of half the batch's": shares.get(b, ""), "samples": f"{one.median * b:,.0f}"}
                for b, one in best.items()]
        return aligned([list(rows[0]), *(list(row.values()) for row in rows)], left=())

    def note(self, results: dict) -> str:
        args = self.args
        text = (f"Steps until the validation loss is {args.loss:g} nats a byte, over "
                f"{count(args.seeds, 'seed')}, with the best of the rates "
                f"{', '.join(f'{rate:g}' for rate in sorted(args.lr))}.\n"
                f"A sample has {POSITIONS} bytes. A run counts as inf after {args.max_steps:,} steps or "
                f"{args.max_samples:,} samples.")
        if fewest := hyperbola(self.best(results)):
            text += (f"\n\nMcCandlish's curve through the medians: {fewest[0]:,.0f} steps + {fewest[1]:,.0f} samples "
                     f"/ B.\nAt B = {fewest[1] / fewest[0]:,.0f}, the critical batch size, a run needs twice the "
                     "fewest steps and twice the fewest samples.")
        return text

    def panels(self, results: dict) -> list[Panel]:
        """Draw steps and samples next to perfect scaling and McCandlish's curve."""
        best = self.best(results)
        reached = {b: one.steps for b, one in best.items() if np.isfinite(one.steps).all()}
        b, steps = np.array(list(reached)), {}
        if reached:
            measured = np.array(list(reached.values())).T       # [seeds, batch sizes]
            steps = {"measured": measured, "perfect scaling": np.median(measured[:, :1], 0, keepdims=True) * b[0] / b}
            if fewest := hyperbola(best):
                steps["fewest steps + fewest samples / B"] = fewest[0] + fewest[1] / b[None]
        return [Panel(title, "batch size B", {name: (b, y * scale) for name, y in steps.items()}, "xy")
                for title, scale in (("steps", 1), ("samples", b))]


def medians(results: dict[int, Measured]) -> dict[int, float]:
    """Return the median steps of the batch sizes that reach the loss."""
    return {b: found.median for b, found in results.items() if np.isfinite(found.median)}


def hyperbola(results: dict[int, Measured]) -> tuple[float, float] | None:
    """Fit steps = fewest steps + fewest samples / B to the medians, by least squares of the relative errors.

    Return the fewest steps and the fewest samples; None if the medians do not fall like that.
    """
    median = medians(results)
    if len(median) < 3:
        return None
    fewest = np.linalg.lstsq(np.array([[1 / s, 1 / (b * s)] for b, s in median.items()]), np.ones(len(median)))[0]
    return tuple(fewest.tolist()) if (fewest > 0).all() else None


if __name__ == "__main__":
    run(lambda: BatchSize.show(world()))
