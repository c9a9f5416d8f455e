"""The price of sharing parameters: `mpirun -np 2 python -m mpi_impl.experiments.shared_layers`.

ALBERT (Lan et al. 2019, section 3.1) computes all its layers with the parameters of one. That makes a model smaller,
not faster: every layer still computes as much, and keeps as many activations. This experiment is a small one: narrow
GPTs, from several seeds, that must learn a table by heart. It says which number follows any two, so that a model needs
parameters to keep it in. Each model is trained with a block for every layer; with one block for all layers; and with
one layer, which has as many parameters as the shared ones, and computes less.

Each rank trains one model at a time. The result does not depend on the number of ranks.
"""
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import Topology
from mpi_impl.experiments.divided_runs import do_all, each_alone, final
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group, parse_given
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.prediction.predict import predict_pipeline
from mpi_impl.prediction.rank import ImaginedWorld
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import aligned
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ModelConfig, require_not_negative, require_positive
from reference.costs.flops import iteration_flops
from reference.costs.parameters import parameters
from reference.optimizer import OptimizerConfig
from reference.precision import Precision

NUMBERS, POSITIONS, SAMPLES = 64, 16, 32        # V, s, B
HIDDEN, HEADS = 32, 2
WARMUP = 0.1                                    # of the iterations
CHANCE = float(np.log(NUMBERS))                 # the loss of a guess
FIRST = CHANCE / POSITIONS                      # of one that knows the table: the first number has no two before
KINDS = ("a block for each layer", "one block for all layers", "one layer")


@option_group
class SharedLayersOptions:
    """The models, their training and its picture."""

    num_layers: int = option_field(4, metavar="L")
    seeds: int = option_field(3, "how many models of each kind")
    train_iters: int = option_field(800, metavar="N")
    lr: float = option_field(3e-3, "the same for all")
    plot: str = option_field("shared_layers.png", metavar="F")


class SharingRun(NamedTuple):
    """A model to train."""

    kind: str
    seed: int


class Result(NamedTuple):
    """The losses [iterations] of a run, and the bytes of its states and of its activations."""

    losses: np.ndarray
    states: int
    activations: int


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    args = parse_options(argv)
    ranks.broadcast_object(lambda: check_outputs(args))
    runs = [SharingRun(kind, seed) for seed in range(args.seeds) for kind in KINDS]
    with each_alone(ranks) as topology:
        results = do_all(ranks, runs, lambda one: train(one, args, topology),
                         lambda one, found: f"{one.kind:<24}, seed {one.seed}: final loss {final(found.losses):.3f}")
    if ranks.rank == 0:
        print(f"\n{table(results, args)}\n")
        from mpi_impl.experiments.curves import draw_shared_layers  # matplotlib takes a second to import
        draw_shared_layers(args.plot, {one: found.losses for one, found in results.items()}, args.num_layers,
                           {"guesses": CHANCE, "knows the table": FIRST})
        print(f"losses drawn in {args.plot}", flush=True)
    ranks.allgather_objects(None)


def parse_options(argv: Sequence[str] | None) -> SharedLayersOptions:
    description = "Train narrow GPTs whose layers have blocks of their own, or share one."
    args = SharedLayersOptions(**parse_given("mpi_impl.experiments.shared_layers", description, SharedLayersOptions,
                                             argv))
    for name in ("num_layers", "seeds", "train_iters"):
        require_positive(name, getattr(args, name))
    require_not_negative("lr", args.lr)
    return args


def model_of(kind: str, layers: int) -> ModelConfig:
    """Return a model of this kind, with so many layers, or with one."""
    model = ModelConfig(layers, HIDDEN, HEADS, NUMBERS, POSITIONS, init_method_std=0.1, hidden_dropout=0,
                        attention_dropout=0, make_vocab_size_divisible_by=1)
    return {"a block for each layer": model, "one block for all layers": replace(model, share_layers=True),
            "one layer": replace(model, num_layers=1)}[kind]


def train(one: SharingRun, args: SharedLayersOptions, topology: Topology) -> Result:
    """Train a model, and find the bytes that it needs."""
    optimizer = OptimizerConfig(args.lr, args.train_iters, lr_warmup_iters=int(WARMUP * args.train_iters))
    state = ModelState(model_of(one.kind, args.num_layers), topology, one.seed, Precision("float32"))
    trainer = Trainer(state, optimizer)
    losses = np.array([trainer.step([batch], SAMPLES).loss
                       for _, batch in zip(range(args.train_iters), batches(one.seed))])
    (predicted,) = predict_pipeline(topology, ImaginedWorld(state.model, topology.config, state.precision, SAMPLES,
                                                            POSITIONS, microbatches=1))
    return Result(losses, predicted.held.states, predicted.held.activations)


def batches(seed: int) -> Iterator[GPTBatch]:
    """Make sequences of numbers that begin with any two; from there each follows from the two before it, by a table."""
    rng = np.random.default_rng(seed)
    following = rng.integers(NUMBERS, size=(NUMBERS, NUMBERS))
    while True:
        numbers = rng.integers(NUMBERS, size=(SAMPLES, POSITIONS + 1))
        for i in range(2, POSITIONS + 1):
            numbers[:, i] = following[numbers[:, i - 2], numbers[:, i - 1]]
        yield GPTBatch(numbers[:, :-1], numbers[:, 1:])


def table(results: dict[SharingRun, Result], args: SharedLayersOptions) -> str:
    """Return a table of each kind's size, memory and work, and of the median and the spread of its loss."""
    rows = [["", "parameters", "states, bytes", "activations, bytes", "FLOPs of a step", "final loss: median", "least",
             "most"]]
    for kind in KINDS:
        found = [result for one, result in results.items() if one.kind == kind]
        finals, model = sorted(final(result.losses) for result in found), model_of(kind, args.num_layers)
        rows.append([kind, f"{parameters(model):,}", f"{found[0].states:,}", f"{found[0].activations:,}",
                     f"{iteration_flops(model, SAMPLES, POSITIONS):,.0f}",
                     *(f"{loss:.3f}" for loss in (np.median(finals), finals[0], finals[-1]))])
    return (f"{aligned(rows, left=(0,))}\nStates are parameters, gradients and Adam's two moments; activations are "
            f"what a step of {SAMPLES} samples saves for its backward.\nThe final loss is the mean of the last "
            f"tenth of {args.train_iters} iterations, in nats; a guess has ln {NUMBERS} = {CHANCE:.3f}, and a model "
            f"that knows the table has {FIRST:.3f}.")


if __name__ == "__main__":
    run(lambda: show(world()))
