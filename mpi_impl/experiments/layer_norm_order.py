"""The reason why BERT's layer norms were moved: `mpirun -np 2 python -m mpi_impl.experiments.layer_norm_order`.

Shoeybi et al. 2019 (section 5.3, figure 7) found that BERTs larger than BERT-Large get worse, unless the residual
connection bypasses the layer norm instead of beginning behind it; and that then they can be trained with a larger rate,
too. This experiment is a small one: narrow BERTs, shallow and deep, in both orders, otherwise identical, each from
several seeds. They fill in masked numbers of sequences with equal steps, for which they must look at other positions,
in both directions.

Each rank trains one model at a time. The result does not depend on the number of ranks.
"""
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import Topology, connect, disconnect
from mpi_impl.experiments.divided_runs import do_all
from mpi_impl.launching.entry import run
from mpi_impl.launching.option_fields import option_field, parse_given
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import aligned
from mpi_impl.training.trainer import Trainer
from reference.batches import BERTBatch
from reference.config import ModelConfig, ParallelConfig, require_positive
from reference.optimizer import OptimizerConfig
from reference.precision import Precision

NUMBERS, POSITIONS, SAMPLES = 24, 16, 32        # V without the mask, s, B
MASK, MASKED = NUMBERS, 0.15                    # the token, and its share
HIDDEN, HEADS = 32, 2
WARMUP = 0.1                                    # of the iterations
CHANCE = float(np.log(NUMBERS))                 # the loss of a guess without looking at the other numbers
LAST = 0.1                                      # the share of iterations whose mean is the final loss
ORDERS = {"rearranged": False, "original": True}


@dataclass(frozen=True, kw_only=True)
class LayerNormOrderOptions:
    """The models, their training and its picture."""

    layers: tuple[int, ...] = option_field((4, 24), "(default: 4 24)", "L")
    seeds: int = option_field(5, "how many models of each kind")
    train_iters: int = option_field(600, metavar="N")
    lr: float = option_field(3e-3, "the same for all")
    plot: str = option_field("layer_norm_order.png", metavar="F")


class Run(NamedTuple):
    """A model to train."""

    layers: int
    order: str
    seed: int


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    args = parse_options(argv)
    ranks.broadcast_object(lambda: check_outputs(args))
    runs = [Run(layers, order, seed) for layers in sorted(args.layers, reverse=True) for seed in range(args.seeds)
            for order in ORDERS]
    losses = train_all(ranks, runs, args.train_iters, args.lr)
    if ranks.rank == 0:
        print(f"\n{table(losses, args.train_iters)}\n")
        from mpi_impl.experiments.curves import draw_curves  # matplotlib takes a second to import
        draw_curves(args.plot, losses, CHANCE)
        print(f"losses drawn in {args.plot}", flush=True)
    ranks.allgather_objects(None)


def parse_options(argv: Sequence[str] | None) -> LayerNormOrderOptions:
    description = "Train narrow BERTs, shallow and deep, in both orders of layer norm and residual."
    args = LayerNormOrderOptions(**parse_given("mpi_impl.experiments.layer_norm_order", description,
                                               LayerNormOrderOptions, argv))
    for name, value in (("seeds", args.seeds), ("train_iters", args.train_iters), ("layers", min(args.layers)),
                        ("layers", max(args.layers))):
        require_positive(name, value)
    return args


def train_all(ranks: Group, runs: list[Run], iterations: int, lr: float) -> dict[Run, np.ndarray]:
    """Return the losses of all runs, [iterations] each; every rank trains some of them."""
    topology = connect(ranks.split(ranks.rank, "one rank"), ParallelConfig())
    losses = do_all(ranks, runs, lambda one: train(one, topology, iterations, lr),
                    lambda one, found: f"{one.layers:>3} layers, {one.order:<10}, seed {one.seed}: final loss "
                                       f"{final(found):.3f}")
    disconnect(topology)
    return losses


def train(one: Run, topology: Topology, iterations: int, lr: float) -> np.ndarray:
    """Return the losses, [iterations]; infinite from the first that is not a number."""
    model = ModelConfig(one.layers, HIDDEN, HEADS, NUMBERS + 1, POSITIONS, init_method_std=0.1, hidden_dropout=0,
                        attention_dropout=0, architecture="bert", make_vocab_size_divisible_by=1,
                        apply_residual_connection_post_layernorm=ORDERS[one.order])
    optimizer = OptimizerConfig(lr, iterations, lr_warmup_iters=int(WARMUP * iterations))
    trainer = Trainer(ModelState(model, topology, one.seed, Precision("float32")), optimizer)
    losses = np.full(iterations, np.inf)
    with np.errstate(all="ignore"):
        for i, batch in zip(range(iterations), batches(one.seed)):
            losses[i] = trainer.step([batch], SAMPLES).loss
            if not np.isfinite(losses[i]):
                losses[i:] = np.inf
                break
    return losses


def batches(seed: int) -> Iterator[BERTBatch]:
    """Make sequences of numbers with equal steps, modulo the vocabulary: n, n + k, n + 2k, ...; some are masked."""
    rng = np.random.default_rng(seed)
    while True:
        first, step = rng.integers(NUMBERS, size=(SAMPLES, 1)), rng.integers(1, 4, size=(SAMPLES, 1))
        numbers = (first + step * np.arange(POSITIONS)) % NUMBERS
        masked = np.less(rng.random(numbers.shape), MASKED)
        masked[:, 0] |= ~masked.any(1)
        yield BERTBatch(np.where(masked, MASK, numbers), np.zeros_like(numbers), np.where(masked, numbers, 0),
                        masked.astype(np.int64), np.full(SAMPLES, POSITIONS), np.zeros(SAMPLES, np.int64))


def final(losses: np.ndarray) -> float:
    """Return the mean of the last tenth."""
    return float(losses[-max(1, int(LAST * len(losses))):].mean())


def table(losses: dict[Run, np.ndarray], iterations: int) -> str:
    """Return a table of the median and the spread over the seeds, for each depth and order."""
    rows = [["layers", "order", "final loss: median", "least", "most", "not below chance"]]
    for layers, order in dict.fromkeys((one.layers, one.order) for one in reversed(losses)):
        finals = sorted(final(x) for one, x in losses.items() if (one.layers, one.order) == (layers, order))
        stuck = sum(x > CHANCE - 0.05 for x in finals)
        rows.append([str(layers), order, f"{np.median(finals):.3f}", f"{finals[0]:.3f}", f"{finals[-1]:.3f}",
                     f"{stuck} of {len(finals)}"])
    return (f"{aligned(rows, left=(1,))}\nThe final loss is the mean of the last tenth of {iterations} iterations, in "
            f"nats; a guess without looking at the other numbers has ln {NUMBERS} = {CHANCE:.3f}.")


if __name__ == "__main__":
    run(lambda: show(world()))
