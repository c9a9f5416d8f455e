"""The price of late gradients: `mpirun -np 2 python -m mpi_impl.experiments.stale_weights`.

A GPT in a pipeline learns to continue sequences of numbers by plain gradient descent, in four ways: with a flush after
every microbatch; with a flush after several, whose gradients are averaged; without a flush, with stashed weights; and
without a flush, with the newest weights (reference/parallel/stale_weights.py). All ways see the same microbatches. What
they gain or lose shows against *time*: here that of the pipeline's ranks, in units of a microbatch's forward and
backward on one rank.

The pipeline is simulated in one process; each rank does one run at a time.
"""
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.experiments.divided_runs import do_all, final
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group, parse_given
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import aligned
from reference.batches import GPTBatch
from reference.config import ModelConfig, require_positive
from reference.errors import UserError
from reference.models.model import model_tensors
from reference.parallel.pipeline import pipeline_gradients, split_into_stages
from reference.parallel.stages import layers_of_stage
from reference.parallel.stale_weights import train_without_flush
from reference.params import initialize, tree_map
from reference.schedules.generators import make

NUMBERS, POSITIONS, SAMPLES = 24, 12, 8         # V, s, b
HIDDEN, HEADS = 32, 2
WAYS = {"flush, each": "a flush after each microbatch", "flush, some": "a flush after several",
        "stashed": "no flush, stashed weights", "newest": "no flush, newest weights"}


@option_group
class StaleWeightsOptions:
    """The pipeline, its training and its picture."""

    stages: int = option_field(6, "ranks of the pipeline, a layer each", metavar="P")
    microbatches: int = option_field(480, metavar="M")
    flush_after: int = option_field(12, "the several microbatches of a step with a flush", metavar="M")
    lr: tuple[float, ...] = option_field((0.1, 0.3), "rates of gradient descent (default: 0.1 0.3)", "R")
    seeds: int = option_field(3, "runs of each kind")
    plot: str = option_field("stale_weights.png", metavar="F")


class StaleRun(NamedTuple):
    """A model to train, in one of the WAYS."""

    way: str
    lr: float
    seed: int


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    args = parse_options(argv)
    ranks.broadcast_object(lambda: check_outputs(args))
    runs = [StaleRun(way, lr, seed) for lr in args.lr for seed in range(args.seeds) for way in WAYS]
    losses = do_all(ranks, runs, partial(train, args=args),
                    lambda one, found: f"{WAYS[one.way]}, rate {one.lr:g}, seed {one.seed}: final loss "
                                       f"{final(found):.3f}")
    if ranks.rank == 0:
        print(f"\n{table(losses, args)}\n")
        from mpi_impl.experiments.curves import draw_stale_weights  # matplotlib takes a second to import
        draw_stale_weights(args.plot, losses, {way: times(way, args) for way in WAYS}, np.log(NUMBERS))
        print(f"losses drawn in {args.plot}", flush=True)
    ranks.allgather_objects(None)


def parse_options(argv: Sequence[str] | None) -> StaleWeightsOptions:
    description = "Train a GPT in a pipeline with and without flushes, by late gradients and by true ones."
    args = StaleWeightsOptions(**parse_given("mpi_impl.experiments.stale_weights", description, StaleWeightsOptions,
                                             argv))
    for name in ("stages", "microbatches", "flush_after", "seeds"):
        require_positive(name, getattr(args, name))
    if min(args.lr) <= 0:
        raise UserError(f"--lr is {' '.join(f'{rate:g}' for rate in args.lr)}, but each must be a number above 0.")
    return args


def train(one: StaleRun, args: StaleWeightsOptions) -> np.ndarray:
    """Return each microbatch's loss, [m]; infinite from the first that is not a number."""
    c = ModelConfig(args.stages, HIDDEN, HEADS, NUMBERS, POSITIONS, init_method_std=0.1, hidden_dropout=0,
                    attention_dropout=0, untie_embeddings_and_output_weights=True, make_vocab_size_divisible_by=1)
    params = initialize(model_tensors(c), one.seed, np.float64)
    stages = split_into_stages(params, [layers_of_stage(i, args.stages, args.stages) for i in range(args.stages)], c)
    batches = [batch for batch, _ in zip(sequences(one.seed), range(args.microbatches))]
    with np.errstate(all="ignore"):
        if one.way in ("stashed", "newest"):
            schedule = make("1f1b", args.stages, args.microbatches)
            losses, _, _ = train_without_flush(batches, stages, schedule, c, one.lr, stash=one.way == "stashed")
        else:
            losses = train_with_flush(batches, stages, step_of(one.way, args), c, one.lr)
    broken = ~np.isfinite(losses)
    return np.where(np.logical_or.accumulate(broken), np.inf, losses)


def train_with_flush(batches: list[GPTBatch], stages, microbatches: int, c: ModelConfig, lr: float) -> list[float]:
    """Return each microbatch's loss: the mean over its step, in which nothing moves."""
    losses: list[float] = []
    for first in range(0, len(batches), microbatches):
        step = batches[first:first + microbatches]
        loss, grads = pipeline_gradients(step, stages, make("1f1b", len(stages), len(step)), c)
        stages = [tree_map(lambda weight, grad: weight - lr * grad, *each) for each in zip(stages, grads)]
        losses += [loss] * len(step)
    return losses


def sequences(seed: int) -> Iterator[GPTBatch]:
    """Make sequences of numbers with equal steps, modulo the vocabulary: n, n + k, n + 2k, ..."""
    rng = np.random.default_rng(seed)
    while True:
        first, step = rng.integers(NUMBERS, size=(SAMPLES, 1)), rng.integers(1, 4, size=(SAMPLES, 1))
        yield GPTBatch.unpack((first + step * np.arange(POSITIONS + 1)) % NUMBERS)


def step_of(way: str, args: StaleWeightsOptions) -> int:
    """Return the number of microbatches between two flushes: all of them where there is none."""
    return {"flush, each": 1, "flush, some": args.flush_after}.get(way, args.microbatches)


def times(way: str, args: StaleWeightsOptions) -> np.ndarray:
    """Return when each microbatch has left the pipeline, [m], in units of a microbatch's work on one rank.

    A step of m microbatches takes m + p - 1 units in 1F1B.
    """
    at, step = np.arange(args.microbatches), step_of(way, args)
    return at // step * (step + args.stages - 1) + at % step + args.stages


def table(losses: dict[StaleRun, np.ndarray], args: StaleWeightsOptions) -> str:
    """Return a table of each way's time, and of the median final loss for each rate."""
    rows = [["", "time", "updates", *(f"loss at rate {lr:g}" for lr in args.lr)]]
    for way, words in WAYS.items():
        finals = [np.median([final(x) for one, x in losses.items() if (one.way, one.lr) == (way, lr)])
                  for lr in args.lr]
        updates = -(-args.microbatches // step_of(way, args)) if way.startswith("flush") else args.microbatches
        rows.append([words, f"{times(way, args)[-1]:,}", f"{updates:,}", *(f"{x:.3f}" for x in finals)])
    return (f"{aligned(rows)}\nTime is in units of a microbatch's forward and backward on one of {args.stages} ranks; "
            f"{args.microbatches} microbatches each.\nThe loss is the median over {args.seeds} seeds of the mean of "
            f"the last tenth; a guess has ln {NUMBERS} = {np.log(NUMBERS):.3f}.")


if __name__ == "__main__":
    run(lambda: show(world()))
