"""The reason why BERT's layer norms were moved: `mpirun -np 2 python -m mpi_impl.experiments.layer_norm_order`.

BERTs larger than BERT-Large got worse (Lan et al. 2019), until Shoeybi et al. 2019 (section 5.3, figure 7) let the
residual connection bypass the layer norm instead of beginning behind it. Then they train stably, and to a lower loss.
This experiment is a small one: narrow BERTs, shallow and deep, in both orders, otherwise identical, each from
several seeds. They fill in masked numbers of sequences with equal steps, for which they must look at other positions,
in both directions.

Each rank trains one model at a time. The result does not depend on the number of ranks.
"""
from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import Topology
from mpi_impl.data.corpus import format_count
from mpi_impl.experiments.divided_runs import do_all, each_alone, final, last_tenth
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group, parse_given
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import aligned
from mpi_impl.training.trainer import Trainer
from reference.batches import BERTBatch
from reference.config import ModelConfig, require_not_negative, require_positive
from reference.optimizer import OptimizerConfig
from reference.precision import Precision

NUMBERS, POSITIONS, SAMPLES = 24, 16, 32        # V without the mask, s, B
MASK, MASKED = NUMBERS, 0.15                    # the token, and its share
HIDDEN, HEADS = 32, 2
WARMUP = 0.1                                    # of the iterations
CHANCE = float(np.log(NUMBERS))                 # the loss of a guess without looking at the other numbers
ORDERS = {"rearranged": False, "original": True}


@option_group
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


class Trained(NamedTuple):
    """The losses of a run, [iterations], and the seconds that an iteration took."""

    losses: np.ndarray
    seconds: float


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    args = parse_options(argv)
    ranks.broadcast_object(lambda: check_outputs(args))
    runs = [Run(layers, order, seed) for layers in sorted(args.layers, reverse=True) for seed in range(args.seeds)
            for order in ORDERS]
    with each_alone(ranks) as topology:
        trained = do_all(ranks, runs, partial(train, topology=topology, iterations=args.train_iters, lr=args.lr),
                         lambda one, found: f"{one.layers:>3} layers, {one.order:<10}, seed {one.seed}: final loss "
                                            f"{final(found.losses):.3f}")
    if ranks.rank == 0:
        losses = {one: found.losses for one, found in trained.items()}
        print(f"\n{table(losses, args.train_iters)}\n\n{conclusions(trained, ranks.size)}\n")
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
    require_not_negative("lr", args.lr)
    return args


def train(one: Run, topology: Topology, iterations: int, lr: float) -> Trained:
    """Train a model until a loss is not a number: from there on they are infinite."""
    model = ModelConfig(one.layers, HIDDEN, HEADS, NUMBERS + 1, POSITIONS, init_method_std=0.1, hidden_dropout=0,
                        attention_dropout=0, architecture="bert", make_vocab_size_divisible_by=1,
                        apply_residual_connection_post_layernorm=ORDERS[one.order])
    optimizer = OptimizerConfig(lr, iterations, lr_warmup_iters=int(WARMUP * iterations))
    trainer = Trainer(ModelState(model, topology, one.seed, Precision("float32")), optimizer)
    losses, begin = np.full(iterations, np.inf), perf_counter()
    with np.errstate(all="ignore"):
        for i, batch in zip(range(iterations), batches(one.seed)):
            losses[i] = trainer.step([batch], SAMPLES).loss
            if not np.isfinite(losses[i]):
                losses[i:] = np.inf
                break
    return Trained(losses, (perf_counter() - begin) / (i + 1))


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


# ---- what it says ---------------------------------------------------------------------------------------------------


def finals(losses: dict[Run, np.ndarray], layers: int, order: str) -> list[float]:
    """Return the final losses over the seeds, sorted."""
    return sorted(final(x) for one, x in losses.items() if (one.layers, one.order) == (layers, order))


def is_stuck(loss: float) -> bool:
    """Report whether a model is no better than chance."""
    return loss > CHANCE - 0.05


def table(losses: dict[Run, np.ndarray], iterations: int) -> str:
    """Return a table of the median and the spread over the seeds, for each depth and order."""
    rows = [["layers", "order", "final loss: median", "least", "most", "not below chance"]]
    for layers, order in dict.fromkeys((one.layers, one.order) for one in reversed(losses)):
        found = finals(losses, layers, order)
        rows.append([str(layers), order, f"{np.median(found):.3f}", f"{found[0]:.3f}", f"{found[-1]:.3f}",
                     f"{sum(map(is_stuck, found))} of {len(found)}"])
    return (f"{aligned(rows, left=(1,))}\nThe final loss is the mean of the last tenth of {iterations} iterations, in "
            f"nats; a guess without looking at the other numbers has ln {NUMBERS} = {CHANCE:.3f}.")


def conclusions(trained: dict[Run, Trained], ranks: int) -> str:
    """Say which order wins at each depth, and what more layers do in each order."""
    losses = {one: found.losses for one, found in trained.items()}
    depths = sorted({one.layers for one in losses})
    said = [compare_orders(layers, *(finals(losses, layers, order) for order in ORDERS)) for layers in depths]
    if len(depths) > 1:
        few, many = depths[0], depths[-1]
        for order in ORDERS:
            shallow, deep = (float(np.median(finals(losses, layers, order))) for layers in (few, many))
            worse = deep >= shallow
            said.append(f"In the {order} order {many} layers are {'worse' if worse else 'better'} than {few}: "
                        f"{deep:.3f} and {shallow:.3f}.")
            if worse and order == "rearranged":
                said.append(forecast(trained, few, many, shallow, ranks))
    return "\n".join(said)


def compare_orders(layers: int, rearranged: list[float], original: list[float]) -> str:
    medians = {"rearranged": float(np.median(rearranged)), "original": float(np.median(original))}
    better, other = sorted(medians, key=medians.__getitem__)
    overlap = rearranged[0] <= original[-1] and original[0] <= rearranged[-1]
    stuck = sum(map(is_stuck, {"rearranged": rearranged, "original": original}[other]))
    return (f"With {format_count(layers, 'layer')} the {better} order has the lower median: {medians[better]:.3f}, and "
            f"{medians[other]:.3f} in the {other} order. "
            + ("The seeds' spreads overlap." if overlap else "The seeds' spreads do not overlap.")
            + (f" In the {other} order {stuck} of {len(original)} are not below chance." if stuck else ""))


def forecast(trained: dict[Run, Trained], few: int, many: int, aim: float, ranks: int) -> str:
    """Say how long the deep models, rearranged, would take to `aim`, the loss that the shallow ones have reached.

    They need as many times more iterations for it as for the loss that they did reach.
    """
    shallow, deep = (np.median([found.losses for one, found in trained.items()
                                if (one.layers, one.order) == (layers, "rearranged")], 0) for layers in (few, many))
    iterations, reached = len(deep), final(deep)
    if is_stuck(reached):
        return f"The {many} layers have not begun to learn in {iterations:,} iterations; give them more."
    window = last_tenth(iterations)
    means = np.convolve(shallow, np.full(window, 1 / window), "valid")      # as `final`, after each iteration
    earlier = window + next(iter(np.flatnonzero(means <= reached)), iterations - window)
    needed = iterations * iterations / earlier
    models = [found.seconds for one, found in trained.items() if (one.layers, one.order) == (many, "rearranged")]
    minutes = needed * np.sum(models) / min(ranks, len(models)) / 60
    return (f"What {many} layers reached after {iterations:,} iterations, {few} had reached after {earlier:,}. At that "
            f"pace {many} layers need about {needed:,.0f} iterations\nto reach {aim:.3f}: with the "
            f"{np.median(models):.3f} s of an iteration here, {minutes:,.1f} minutes for {len(models)} models on "
            f"{format_count(ranks, 'rank')}.")


if __name__ == "__main__":
    run(lambda: show(world()))
