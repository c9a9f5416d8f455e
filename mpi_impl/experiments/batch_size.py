"""The price of large batches: `mpirun -np 2 python -m mpi_impl.experiments.batch_size`.

Data parallelism divides a batch over replicas, so more replicas need a larger batch. A larger batch has a less noisy
gradient, which permits a larger rate, and fewer steps reach the same loss. While twice the batch needs half the steps,
twice the replicas need half the time. That ends: a gradient without noise still needs its steps (Shallue et al. 2019).
McCandlish et al. 2018 (equation 2.11) describe it by two numbers, the fewest steps and the fewest samples:

    (steps / fewest steps - 1) (samples / fewest samples - 1) = 1

This experiment counts the steps that a small GPT needs to reach a given validation loss on the bytes of Python's own
standard library, for batches of 1, 2, 4 ... samples. For each batch size the rate is the best of a few: the one whose
median over the seeds is least.

Each rank measures one batch size at a time. The result does not depend on the number of ranks.
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import Topology
from mpi_impl.data.corpus import format_count
from mpi_impl.experiments.byte_windows import BYTES, Text, gpt_batch, read_text
from mpi_impl.experiments.divided_runs import do_all, each_alone
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group, parse_given
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import aligned
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, require_positive
from reference.errors import UserError
from reference.optimizer import OptimizerConfig
from reference.precision import Precision

LAYERS, HIDDEN, HEADS, POSITIONS = 1, 32, 2, 32             # s last
WARMUP = 10                                                 # steps
EVALUATED, EVERY = 256, 0.05    # samples of an evaluation, always the same; steps from one to the next, as a share
PATIENCE = 2                    # times the steps of the best rate so far
NEARLY_HALF = 0.6               # of the steps: what twice the batch may leave


@option_group
class BatchSizeOptions:
    """The batches, the loss to reach and the picture."""

    batch_size: tuple[int, ...] = option_field((1, 2, 4, 8, 16, 32, 64, 128), "(default: 1 2 4 ... 128)", "B")
    loss: float = option_field(2.5, "the validation loss to reach, nats a byte")
    lr: tuple[float, ...] = option_field((1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), "rates to choose from", "R")
    seeds: int = option_field(3, "runs of each batch size")
    max_steps: int = option_field(6000, "after which a run is given up", "N")
    max_samples: int = option_field(40_000, "after which a run is given up", "N")
    plot: str = option_field("batch_size.png", metavar="F")


class BatchRun(NamedTuple):
    """A model to train."""

    batch_size: int
    lr: float
    seed: int


class Measured(NamedTuple):
    """The best rate for a batch size, and the steps of its runs, sorted."""

    lr: float
    steps: list[float]

    @property
    def median(self) -> float:
        return float(np.median(self.steps))


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    args = parse_options(argv)
    ranks.broadcast_object(lambda: check_outputs(args))
    text = read_text()
    with each_alone(ranks) as topology:
        count = partial(steps_to_loss, text=text, topology=topology, args=args)
        measured = do_all(ranks, sorted(args.batch_size), partial(measure, count=count, args=args), tell)
    if ranks.rank == 0:
        steps = {b: found.steps for b, found in measured.items()}
        print(f"\n{table(measured, args)}\n\n{conclusions(steps)}\n")
        from mpi_impl.experiments.size_pictures import draw_batch_size  # matplotlib takes a second to import
        draw_batch_size(args.plot, steps, hyperbola(steps), args.loss)
        print(f"steps drawn in {args.plot}", flush=True)
    ranks.allgather_objects(None)


def parse_options(argv: Sequence[str] | None) -> BatchSizeOptions:
    description = "Count the steps that batches of several sizes need to reach a loss."
    args = BatchSizeOptions(**parse_given("mpi_impl.experiments.batch_size", description, BatchSizeOptions, argv))
    for name, value in (("seeds", args.seeds), ("max_steps", args.max_steps), ("max_samples", args.max_samples),
                        ("batch_size", min(args.batch_size)), ("batch_size", max(args.batch_size))):
        require_positive(name, value)
    if args.loss <= 0:
        raise UserError(f"--loss is {args.loss:g}, but no model has a loss of 0 or less. Give a number above 0.")
    if min(args.lr) <= 0:
        raise UserError(f"--lr is {' '.join(f'{rate:g}' for rate in args.lr)}, but each must be a number above 0.")
    return args


def measure(batch_size: int, count: Callable[[BatchRun, int], float], args: BatchSizeOptions) -> Measured:
    """Find the rate with the least median over the seeds. A run that takes twice the best median so far is given up."""
    best, limit = Measured(min(args.lr), [np.inf] * args.seeds), most_steps(batch_size, args)
    for lr in sorted(args.lr):
        found = Measured(lr, sorted(count(BatchRun(batch_size, lr, seed), limit) for seed in range(args.seeds)))
        if found.median < best.median:
            best, limit = found, min(limit, int(PATIENCE * found.median))
    return best


def most_steps(batch_size: int, args: BatchSizeOptions) -> int:
    """Return after how many steps a run that has not reached the loss is given up."""
    return max(1, min(args.max_steps, args.max_samples // batch_size))


def steps_to_loss(one: BatchRun, limit: int, text: Text, topology: Topology, args: BatchSizeOptions) -> float:
    """Return after how many steps the loss was reached; infinite if it was not within the limit."""
    model = ModelConfig(LAYERS, HIDDEN, HEADS, BYTES, POSITIONS, init_method_std=0.05, hidden_dropout=0,
                        attention_dropout=0, make_vocab_size_divisible_by=1)
    optimizer = OptimizerConfig(one.lr, limit, lr_decay_style="constant", lr_warmup_iters=WARMUP)
    trainer = Trainer(ModelState(model, topology, one.seed, Precision("float32")), optimizer)
    rng, unseen = (np.random.default_rng(one.seed),
                   gpt_batch(text.validation, np.random.default_rng(0), EVALUATED, POSITIONS))
    evaluation = 1
    for step in range(1, limit + 1):
        with np.errstate(all="ignore"):
            trainer.step([gpt_batch(text.training, rng, one.batch_size, POSITIONS)], one.batch_size)
            if step == evaluation:
                if trainer.evaluate([unseen], EVALUATED)[0] <= args.loss:
                    return step
                evaluation = max(step + 1, int((1 + EVERY) * step))
    return np.inf


def tell(batch_size: int, found: Measured) -> str:
    return f"batch of {batch_size:>3}: rate {found.lr:g}, {found.steps[0]:,.0f} to {found.steps[-1]:,.0f} steps"


# ---- what it says ---------------------------------------------------------------------------------------------------


def medians(steps: dict[int, list[float]]) -> dict[int, float]:
    """Return the median steps of the batch sizes that reach the loss."""
    found = {b: float(np.median(several)) for b, several in steps.items()}
    return {b: median for b, median in found.items() if np.isfinite(median)}


def doublings(steps: dict[int, list[float]]) -> dict[int, float]:
    """Return, for each batch size whose double was counted too, the share of its steps that the double needs."""
    found = medians(steps)
    return {b: found[2 * b] / found[b] for b in found if 2 * b in found}


def hyperbola(steps: dict[int, list[float]]) -> tuple[float, float] | None:
    """Fit steps = fewest steps + fewest samples / B to the medians, by least squares of the relative errors.

    Return the fewest steps and the fewest samples; None if the medians do not fall like that.
    """
    found = medians(steps)
    if len(found) < 3:
        return None
    fewest = np.linalg.lstsq(np.array([[1 / s, 1 / (b * s)] for b, s in found.items()]), np.ones(len(found)))[0]
    return tuple(fewest.tolist()) if (fewest > 0).all() else None


def table(measured: dict[int, Measured], args: BatchSizeOptions) -> str:
    shares = doublings({b: found.steps for b, found in measured.items()})
    rows = [["batch", "rate", "steps: median", "least", "most", "of half the batch's", "samples"]]
    for b, found in measured.items():
        rows.append([f"{b:,}", f"{found.lr:g}", *(f"{x:,.0f}" for x in (found.median, found.steps[0], found.steps[-1])),
                     f"{shares[b // 2]:.0%}" if b % 2 == 0 and b // 2 in shares else "", f"{found.median * b:,.0f}"])
    rates = ", ".join(f"{rate:g}" for rate in sorted(args.lr))
    return (f"{aligned(rows, left=())}\nSteps until the validation loss is {args.loss:g} nats a byte, over "
            f"{format_count(args.seeds, 'seed')}, with the best of the rates {rates}.\n"
            f"A sample has {POSITIONS} bytes. A run counts as inf after {args.max_steps:,} steps, {args.max_samples:,} "
            f"samples, or {PATIENCE} times the best rate's steps.")


def conclusions(steps: dict[int, list[float]]) -> str:
    """Say up to where doubling the batch nearly halves the steps, and what it does at the end."""
    shares, found = doublings(steps), medians(steps)
    if not shares:
        return "No batch size and its double have both reached the loss, so there is nothing to compare."
    enough = next((b for b, share in shares.items() if share > NEARLY_HALF), None)
    first, last = min(shares), max(shares)
    said = list[str]()
    if enough is None:
        said.append(f"Every doubling leaves at most {NEARLY_HALF:.0%} of the steps, so no batch here is too large.")
    else:
        if enough > first:
            said.append(f"From {first} to {enough} samples, each doubling of the batch leaves at most "
                        f"{NEARLY_HALF:.0%} of the steps.")
        said.append(f"\nDoubling a batch of {enough} no longer halves them: {2 * enough} samples need "
                    f"{shares[enough]:.0%} of its steps.")
        if last > enough:
            said.append(f"Doubling {last} leaves {shares[last]:.0%}.")
    samples = {b: b * median for b, median in found.items()}
    least, most = min(samples, key=samples.__getitem__), max(found)
    said.append(f"\nThe fewest samples are those of batch size {least}; batch size {most} needs "
                f"{samples[most] / samples[least]:.1f} times as many.")
    if fewest := hyperbola(steps):
        said.append(f"\nMcCandlish's curve through the medians: {fewest[0]:,.0f} steps + {fewest[1]:,.0f} samples / B. "
                    f"\nAt B = {fewest[1] / fewest[0]:,.0f}, the critical batch size, a run needs twice the "
                    "fewest steps and twice the fewest samples.")
    return " ".join(said).replace(" \n", "\n").strip()


if __name__ == "__main__":
    run(lambda: show(world()))
