"""The frame of an experiment: options, runs that are divided among ranks, a table of their results, and a picture.

An experiment is a subclass. It lists its kinds of run, and the batches on which they train; what it prints and draws
follows from the losses. Each rank does one run at a time, so that the number of ranks changes no result.
"""
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.topology import Topology, connect, disconnect
from mpi_impl.launch.option_fields import option_field, option_group, parse_given
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import aligned
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig, require_not_negative, require_positive
from reference.config.checks import option
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from reference.precision import Precision
from shardlab.experiments.panels import Panel, draw_panels

LAST = 0.1      # the share of a run whose mean is its final loss
WARMUP = 0.1    # of the iterations


def each(check: Callable[[str, Any], None]) -> Callable[[str, Iterable], None]:
    """Return the check of an option with several values."""
    def check_each(name: str, values: Iterable) -> None:
        for value in values:
            check(name, value)
    return check_each


def require_above_zero(name: str, value: float) -> None:
    if value <= 0:
        raise UserError(f"{option(name)} is {value:g}, but must be a number above 0.")


@option_group
class PictureOptions:
    """The picture."""

    plot: str = option_field("", "where it is drawn (default: the experiment's name.png)", "F")


@option_group
class RunsOptions(PictureOptions):
    """The runs."""

    seeds: int = option_field(3, "runs of each kind", check=require_positive)


@option_group
class TrainingOptions(RunsOptions):
    """The training."""

    train_iters: int = option_field(1000, metavar="N", check=require_positive)
    lr: float = option_field(3e-3, "the same for all", check=require_not_negative)


class Kind(NamedTuple):
    """A kind of run: the panel of the picture that shows it, and its name there."""

    panel: str
    name: str

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


class Experiment:
    """An experiment, whose docstring is the program's description.

    The program prints `note` below the table. Its picture shows `levels`, losses to compare with, within `ylim`. A
    batch has `samples`.
    """

    name: ClassVar[str]
    options: ClassVar[type]
    samples: ClassVar[int]
    title, xlabel, ylabel = "", "iteration", "loss, nats"
    levels: Mapping[str, float] = MappingProxyType({})
    ylim: tuple[float | None, float | None] = (None, None)

    def __init__(self, args: Any):
        self.args = args

    @classmethod
    def show(cls, ranks: Group, argv: Sequence[str] | None = None) -> None:
        given = parse_given(f"shardlab.experiments.{cls.name}", cls.__doc__ or "", cls.options, argv)
        args = cls.options(**{"plot": f"{cls.name}.png"} | given)
        ranks.broadcast_object(lambda: check_outputs(args))
        experiment = cls(args)
        results = experiment.results(ranks)
        if ranks.rank == 0:
            print(f"\n{experiment.table(results)}\n{experiment.note(results)}\n")
            experiment.draw(results)
            print(f"drawn in {args.plot}", flush=True)
        ranks.allgather_objects(None)

    # ---- the runs ---------------------------------------------------------------------------------------------------

    def kinds(self) -> dict[Any, Any]:
        """Return what `train` needs for each kind of run."""
        raise NotImplementedError

    def batches(self, seed: int) -> Iterator:
        """Make the batches on which every kind trains with this seed."""
        raise NotImplementedError

    def train(self, kind: Any, seed: int, topology: Topology) -> np.ndarray:
        """Return the losses of a run, [points]; infinite from the first that is not a number."""
        n = self.args.train_iters
        trainer, losses = trainer_of(kind, topology, seed, self.args.lr, n), np.full(n, np.inf)
        with np.errstate(all="ignore"):
            for i, batch in zip(range(n), self.batches(seed)):
                loss = trainer.step([batch], self.samples).loss
                if not np.isfinite(loss):
                    break
                losses[i] = loss
        return losses

    def results(self, ranks: Group) -> dict:
        """Return the losses of each kind on every rank, [seeds, points]."""
        kinds, seeds = self.kinds(), range(self.args.seeds)
        with each_alone(ranks) as topology:
            losses = divide(ranks, [(kind, seed) for seed in seeds for kind in kinds],
                            lambda run: self.train(kinds[run[0]], run[1], topology),
                            lambda run, losses: f"{run[0]}, seed {run[1]}: {self.final(losses):,.4g}")
        return {kind: np.array([losses[kind, seed] for seed in seeds]) for kind in kinds}

    # ---- the table --------------------------------------------------------------------------------------------------

    def final(self, losses: np.ndarray) -> Any:
        """Return the final losses of curves [..., points]."""
        return losses[..., -max(1, int(LAST * losses.shape[-1])):].mean(-1)

    def columns(self, kind: Any, losses: np.ndarray) -> dict[str, str]:
        """Return the other columns of the table, by heading."""
        return {}

    def table(self, results: dict) -> str:
        """Return a table of each kind's final losses."""
        rows = [{"": str(kind)} | self.columns(kind, losses) | spread("final loss: median", self.final(losses))
                for kind, losses in results.items()]
        return aligned([list(rows[0]), *(list(row.values()) for row in rows)])

    def note(self, results: dict) -> str:
        raise NotImplementedError

    # ---- the picture ------------------------------------------------------------------------------------------------

    def at(self, kind: Any, points: int) -> np.ndarray:
        """Return the x of each loss of a curve."""
        return np.arange(1, points + 1)

    def panels(self, results: dict) -> list[Panel]:
        return [Panel(panel, self.xlabel, {kind.name: (self.at(kind, losses.shape[1]), losses)
                                           for kind, losses in results.items() if kind.panel == panel})
                for panel in dict.fromkeys(kind.panel for kind in results)]

    def draw(self, results: dict) -> None:
        draw_panels(self.args.plot, self.panels(results), self.title, self.ylabel, self.levels, self.ylim)


# ---- runs on ranks --------------------------------------------------------------------------------------------------


def divide(ranks: Group, runs: Sequence[Hashable], do: Callable[[Any], Any], tell: Callable[[Any, Any], str]) -> dict:
    """Return `do(run)` of all runs on every rank. As each ends, its rank prints what `tell` says of it."""
    results = {}
    for i, run in enumerate(runs):
        if i % ranks.size == ranks.rank:
            results[run] = do(run)
            print(f"{i + 1:>3} of {len(runs)}: {tell(run, results[run])}", flush=True)
    everyone = {run: result for own in ranks.allgather_objects(results) for run, result in own.items()}
    return {run: everyone[run] for run in runs}


@contextmanager
def each_alone(ranks: Group) -> Iterator[Topology]:
    """Give every rank a topology of its own, in which it can train a model without the others."""
    topology = connect(ranks.split(ranks.rank, "one rank"), ParallelConfig())
    yield topology
    disconnect(topology)


def narrow_model(layers: int, hidden: int, heads: int, vocabulary: int, positions: int, **others: Any) -> ModelConfig:
    return ModelConfig(layers, hidden, heads, vocabulary, positions, hidden_dropout=0, attention_dropout=0,
                       make_vocab_size_divisible_by=1, **others)


def trainer_of(model: ModelConfig, topology: Topology, seed: int, lr: float, iterations: int, **others: Any) -> Trainer:
    optimizer = OptimizerConfig(lr, iterations, **{"lr_warmup_iters": int(WARMUP * iterations)} | others)
    return Trainer(ModelState(model, topology, seed, Precision("float32")), optimizer)


def spread(heading: str, values: np.ndarray, form: str = ".3f") -> dict[str, str]:
    """Return the columns of a median, the least and the most."""
    return {heading: format(np.median(values), form), "least": format(values.min(), form),
            "most": format(values.max(), form)}
