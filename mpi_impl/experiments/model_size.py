"""The reason to want larger models: `mpirun -np 2 python -m mpi_impl.experiments.model_size`.

Shoeybi et al. 2019 trained GPTs of 355 million to 8.3 billion parameters and BERTs of 336 million to 3.9 billion, each
family on the same text, and found that each larger model reaches a lower validation loss (figure 6, section 5.3). This
experiment is a small one: GPTs and BERTs that differ in their hidden size only, and, as there, in the number of heads,
since a head keeps its size. They learn the bytes of Python's own standard library, and are evaluated on files of it
that they have not seen.

Each rank trains one model at a time. The result does not depend on the number of ranks.
"""
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import Topology
from mpi_impl.data.corpus import format_count
from mpi_impl.experiments.byte_windows import BYTES, Text, bert_batch, gpt_batch, read_text
from mpi_impl.experiments.divided_runs import do_all, each_alone
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group, parse_given
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import aligned
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, require_not_negative, require_positive
from reference.costs.parameters import parameters
from reference.errors import UserError
from reference.optimizer import OptimizerConfig
from reference.precision import Precision

LAYERS, HEAD_SIZE, POSITIONS, SAMPLES = 2, 16, 32, 16       # s and B last
WARMUP = 0.1                                                # of the iterations
EVALUATIONS, EVALUATED = 20, 256                            # in each run, and the samples of each, always the same
NAMES = {"gpt": "GPT", "bert": "BERT"}
BATCHES = {"gpt": gpt_batch, "bert": bert_batch}


@option_group
class FamilyOptions:
    """The models, their training and its picture."""

    hidden_size: tuple[int, ...] = option_field((16, 32, 64), "(default: 16 32 64)", "H")
    seeds: int = option_field(3, "how many models of each kind and size")
    train_iters: int = option_field(1000, metavar="N")
    lr: float = option_field(2e-3, "the same for all")
    plot: str = option_field("model_size.png", metavar="F")


class SizeRun(NamedTuple):
    """A model to train."""

    architecture: str
    hidden_size: int
    seed: int


class Curve(NamedTuple):
    """Validation losses, and after how many iterations they were taken: both [evaluations]."""

    iterations: np.ndarray
    losses: np.ndarray

    @property
    def final(self) -> float:
        return float(self.losses[-1])


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    args = parse_options(argv)
    ranks.broadcast_object(lambda: check_outputs(args))
    runs = [SizeRun(architecture, size, seed) for size in sorted(args.hidden_size, reverse=True)
            for seed in range(args.seeds) for architecture in NAMES]
    text = read_text()
    with each_alone(ranks) as topology:
        curves = do_all(ranks, runs, partial(train, text=text, topology=topology, args=args),
                        lambda one, found: f"{NAMES[one.architecture]:<4}, h = {one.hidden_size:>3}, seed {one.seed}: "
                                           f"final loss {found.final:.3f}")
    if ranks.rank == 0:
        print(f"\n{table(curves)}\n\n{conclusions(curves)}\n")
        from mpi_impl.experiments.size_pictures import draw_model_size  # matplotlib takes a second to import
        draw_model_size(args.plot, curves)
        print(f"losses drawn in {args.plot}", flush=True)
    ranks.allgather_objects(None)


def parse_options(argv: Sequence[str] | None) -> FamilyOptions:
    description = "Train narrow and wide GPTs and BERTs on the same text."
    args = FamilyOptions(**parse_given("mpi_impl.experiments.model_size", description, FamilyOptions, argv))
    for name, value in (("seeds", args.seeds), ("train_iters", args.train_iters),
                        ("hidden_size", min(args.hidden_size)), ("hidden_size", max(args.hidden_size))):
        require_positive(name, value)
    require_not_negative("lr", args.lr)
    for size in args.hidden_size:
        if size % HEAD_SIZE:
            raise UserError(f"--hidden-size is {size}, but must be a multiple of {HEAD_SIZE}, the size of a head.")
    return args


def model_of(architecture: str, hidden_size: int) -> ModelConfig:
    return ModelConfig(LAYERS, hidden_size, hidden_size // HEAD_SIZE, BYTES + (architecture == "bert"), POSITIONS,
                       init_method_std=0.05, hidden_dropout=0, attention_dropout=0, architecture=architecture,
                       make_vocab_size_divisible_by=1)


def train(one: SizeRun, text: Text, topology: Topology, args: FamilyOptions) -> Curve:
    """Train a model, and evaluate it from time to time. Models with the same seed see the same batches."""
    model, batch_of = model_of(one.architecture, one.hidden_size), BATCHES[one.architecture]
    optimizer = OptimizerConfig(args.lr, args.train_iters, lr_warmup_iters=int(WARMUP * args.train_iters))
    trainer = Trainer(ModelState(model, topology, one.seed, Precision("float32")), optimizer)
    rng, unseen = (np.random.default_rng(one.seed),
                   batch_of(text.validation, np.random.default_rng(0), EVALUATED, POSITIONS))
    every = max(1, args.train_iters // EVALUATIONS)
    iterations, losses = list[int](), list[float]()
    for i in range(1, args.train_iters + 1):
        trainer.step([batch_of(text.training, rng, SAMPLES, POSITIONS)], SAMPLES)
        if i % every == 0 or i == args.train_iters:
            iterations.append(i)
            losses.append(trainer.evaluate([unseen], EVALUATED)[0])     # of its first head: for BERT the masked bytes
    return Curve(np.array(iterations), np.array(losses))


def finals(curves: dict[SizeRun, Curve], architecture: str) -> dict[int, list[float]]:
    """Return the final losses over the seeds, sorted, for each hidden size from the smallest."""
    sizes = sorted({one.hidden_size for one in curves})
    return {size: sorted(curve.final for one, curve in curves.items() if one[:2] == (architecture, size))
            for size in sizes}


def table(curves: dict[SizeRun, Curve]) -> str:
    rows = [["", "h", "parameters", "validation loss: median", "least", "most"]]
    for architecture, name in NAMES.items():
        for size, losses in finals(curves, architecture).items():
            rows.append([name, str(size), f"{parameters(model_of(architecture, size)):,}",
                         f"{np.median(losses):.3f}", f"{losses[0]:.3f}", f"{losses[-1]:.3f}"])
    iterations = next(iter(curves.values())).iterations[-1]
    return (f"{aligned(rows)}\nAll models have {LAYERS} layers and heads of size {HEAD_SIZE}, and have seen "
            f"{iterations * SAMPLES * POSITIONS:,} bytes in {format_count(iterations, 'iteration')}.\n"
            "The loss is in nats a byte; for BERT it is that of masked bytes.")


def conclusions(curves: dict[SizeRun, Curve]) -> str:
    return "\n".join(conclusion(name, finals(curves, architecture)) for architecture, name in NAMES.items())


def conclusion(name: str, losses: dict[int, list[float]]) -> str:
    """Say whether each larger model has a lower loss, and whether its worst seed beats the smaller one's best."""
    pairs = list(zip(losses, list(losses)[1:]))
    worse = [pair for pair in pairs if np.median(losses[pair[1]]) >= np.median(losses[pair[0]])]
    if not pairs:
        return f"{name}: only one size was trained, so there is nothing to compare."
    if worse:
        return f"{name}: not every larger model has a lower loss. " + "; ".join(
            f"h = {large} has {np.median(losses[large]):.3f}, and h = {small} {np.median(losses[small]):.3f}"
            for small, large in worse) + "."
    medians = ", ".join(f"{np.median(found):.3f}" for found in losses.values())
    apart = all(losses[large][-1] < losses[small][0] for small, large in pairs)
    return (f"{name}: each larger model has a lower loss ({medians}), " +
            ("and its worst seed is better than the next smaller model's best." if apart else
             "but the spreads of their seeds overlap."))


if __name__ == "__main__":
    run(lambda: show(world()))
