"""The overlap of gathering and computing in ZeRO-3: `mpirun -np 4 python -m shardlab.experiments.prefetch`.

A GPT trains on ranks that shard its parameters, so that each block is gathered before it computes. With prefetch this
begins while the block before computes; without, when the parameters are needed. Both ways compute the same. How much of
the gathers' time is hidden behind computing depends on how long they take, so that is varied.

The time is that of the virtual clock (mpi_impl/comm/clock.py): computing takes the CPU time that it takes here, and a
message what a link of a chosen speed takes. Ranks that share a machine's cores cannot show the overlap by the wall's
clock, since a core that copies a message does not compute.
"""
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Slice
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group
from mpi_impl.models.units import Unit
from mpi_impl.parallel.zero import GatheredUnit
from mpi_impl.runtime.tables import aligned
from reference.batches import GPTBatch
from reference.config import ParallelConfig, require_positive
from reference.costs.hardware import Link
from reference.errors import UserError
from reference.params import tree_map
from shardlab.experiments.experiment import (Experiment, PictureOptions, each, narrow_model, require_above_zero,
                                             trainer_of)
from shardlab.report.charts import COLORS, WORDS, finish
from shardlab.report.timelines.tracing import TracedSteps

NUMBERS, POSITIONS, SAMPLES, HEADS = 32, 64, 2, 4       # V, s, b, a
IMMEDIATE = Link(0.0, np.inf)
GATHER, REDUCE = "#CC79A7", "#F0C842"                   # colours
COMPUTING = {"F": 1, "B": 2}                            # the predicted time of a block's forward, and of its backward


@option_group
class PrefetchOptions(PictureOptions):
    """The model, its steps, and the speed of messages."""

    num_layers: int = option_field(6, metavar="L", check=require_positive)
    hidden_size: int = option_field(256, metavar="H", check=require_positive)
    steps: int = option_field(5, "in each way", check=require_positive)
    message_time: tuple[float, ...] = option_field(
        (0.5, 1.0, 2.0), "the time to gather a block, as a multiple of its forward's (default: 0.5 1.0 2.0); the "
        "picture shows the first", "R", check=each(require_above_zero))


class TracedStep(NamedTuple):
    """One step of one rank: what it did, with its gathers as a stream of their own, and its loss."""

    slices: list[Slice]
    loss: float

    def stream(self, name: str) -> list[Slice]:
        return [one for one in self.slices if one.stream == name]

    @property
    def seconds(self) -> float:
        return max(one.end for one in self.slices) - min(one.start for one in self.slices)

    def action(self, kind: str) -> Slice:
        """Return the forward (F) or the backward (B) of the step's only microbatch."""
        return next(one for one in self.slices if one.kind == kind)

    def computing(self, kind: str) -> list[tuple[float, float]]:
        """Return from when to when the rank computes in the forward or the backward: between its waits."""
        action = self.action(kind)
        waits = [one for one in self.stream("communication") if action.start <= one.start <= action.end]
        return list(zip([action.start, *(one.end for one in waits)], [*(one.start for one in waits), action.end]))


class Prefetch(Experiment):
    """Measure how much of ZeRO-3's gathering is hidden behind computing, with and without prefetch."""

    name, options = "prefetch", PrefetchOptions

    def results(self, ranks: Group) -> dict[tuple[float, bool], list[list[TracedStep]]]:
        """Return the steps of each rank, by message time, without and with prefetch."""
        if ranks.size == 1:
            raise UserError("A rank alone gathers nothing. Start at least 2 ranks.")
        layers = self.args.num_layers
        steps = ranks.allgather_objects(train(ranks, self.args, True, 0.0))     # where messages take no time
        forwards = [step.action("F") for of_rank in steps for step in of_rank]
        forward = median(one.end - one.start for one in forwards) / layers
        if ranks.rank == 0:
            print(f"{layers} blocks on {ranks.size} ranks; a block's forward takes {1e3 * forward:.2f} ms")
        return {(ratio, early): ranks.allgather_objects(train(ranks, self.args, early, ratio * forward))
                for ratio in self.args.message_time for early in (False, True)}

    def table(self, results: dict) -> str:
        """Tabulate the steps' time and the hidden shares. Nothing can hide the first gather."""
        rows = [["gather / forward", "prefetch", "ms a step", "hidden, forward", "predicted", "hidden, backward",
                 "predicted"]]
        but_first = 1 - 1 / self.args.num_layers
        for (ratio, early), ranks in results.items():
            steps = [step for of_rank in ranks for step in of_rank]
            shares = [share for kind, computing in COMPUTING.items() for share in (
                hidden_share(steps, kind), early * but_first * min(1, computing / ratio))]
            rows.append([f"{ratio:g}", "yes" if early else "no",
                         f"{1e3 * median(step.seconds for step in steps):.1f}", *(f"{x:.0%}" for x in shares)])
        return aligned(rows)

    def note(self, results: dict) -> str:
        return ("The prediction is for forwards of equal length, and backwards that take twice as long. Drawn is rank "
                "0's last step, at the first message time.")

    def draw(self, results: dict) -> None:
        draw_steps(self.args.plot, {f"{name} prefetch": results[self.args.message_time[0], early][0][-1]
                                    for name, early in (("without", False), ("with", True))})


# ---- steps on ranks -------------------------------------------------------------------------------------------------


class WatchedUnit(Unit):
    """A unit whose gathers are noted, and which begins them only when they are wanted if it is not `early`."""

    def __init__(self, unit: GatheredUnit, early: bool, gathers: list[Slice]):
        self.unit, self.early, self.gathers = unit, early, gathers

    def prefetch(self) -> None:
        if self.early:
            self.unit.prefetch()

    def wait(self):
        self.unit.prefetch()
        tensors = self.unit.wait()
        for pending in self.unit.pending or ():
            start = float(pending.stamp[0])
            self.gathers.append(Slice("gathers", self.unit.name, "communication", start, start + pending.takes))
        return tensors

    def release(self) -> None:
        self.unit.release()


def train(ranks: Group, args: PrefetchOptions, early: bool, seconds: float) -> list[TracedStep]:
    """Return this rank's steps, after one that nobody watches. Gathering a block takes `seconds`."""
    model = narrow_model(args.num_layers, args.hidden_size, HEADS, NUMBERS, POSITIONS,
                         untie_embeddings_and_output_weights=True)
    topology = connect(ranks, ParallelConfig(data_parallel_size=ranks.size, zero_stage=3))
    trainer = trainer_of(model, topology, 1, 1e-3, 100, lr_warmup_iters=0)
    gathers: list[Slice] = []
    trainer.state.stage_params = {
        stage: tree_map(lambda unit: WatchedUnit(unit, early, gathers), units)
        for stage, units in trainer.state.stage_params.items()}
    block = trainer.state.layout.bucket_of["blocks.0"].size * trainer.state.device_prototype.itemsize
    link = Link(0.0, block * (ranks.size - 1) / ranks.size / seconds) if seconds else IMMEDIATE
    traced, steps = TracedSteps(topology, VirtualClock(link, memory=1)), []
    for step in range(args.steps + 1):
        gathers.clear()
        with traced.step():
            result = trainer.step([batch(step, ranks.rank)], SAMPLES * ranks.size)
        steps.append(TracedStep([*traced.steps[-1], *gathers], result.loss))
    disconnect(topology)
    return steps[1:]


def batch(step: int, rank: int) -> GPTBatch:
    """Draw a rank's samples: sequences that count on from a number."""
    first = np.random.default_rng([step, rank]).integers(NUMBERS, size=(SAMPLES, 1))
    return GPTBatch.unpack((first + np.arange(POSITIONS + 1)) % NUMBERS)


# ---- what is hidden -------------------------------------------------------------------------------------------------


def hidden_share(steps: Iterable[TracedStep], kind: str) -> float:
    """Return the share of the time of the blocks' gathers in the forwards (F) or the backwards (B) in which the rank
    computes.
    """
    together = behind = 0.0
    for step in steps:
        action = step.action(kind)
        for gather in step.stream("gathers"):
            if gather.name.startswith("blocks.") and action.start <= gather.end <= action.end:
                together += gather.end - gather.start
                behind += sum(max(0.0, min(end, gather.end) - max(start, gather.start))
                              for start, end in step.computing(kind))
    return behind / together


# ---- the picture ----------------------------------------------------------------------------------------------------


def draw_steps(path: str, steps: dict[str, TracedStep]) -> None:
    """Draw a panel for each step, by its name: what a rank does, above the gathers under way."""
    from mpi_impl.runtime.pictures import save  # matplotlib takes a second to import
    from shardlab.report.drawing import SMALL, Picture, draw_box, draw_legend, name_rows

    figure = Picture((10, 1.1 + 1.5 * len(steps)), layout="constrained")
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, step) in zip(panels, steps.items()):
        first = min(one.start for one in step.slices)
        for row, start, end, color, label in bars(step):
            draw_box(axes, 1e3 * (start - first), row + 0.15, 1e3 * (end - start), 0.7, color, label, SMALL,
                     edgecolor="white", linewidth=0.8)
        name_rows(axes, ["the rank", "gathers"])
        finish(axes, "", f"{name}: a step of {1e3 * step.seconds:.1f} ms", "x")
    panels[-1].set(xlim=(0, 1e3 * max(step.seconds for step in steps.values())))
    panels[-1].set_xlabel("time (ms)", fontsize=9)
    draw_legend(figure, {WORDS["F"]: COLORS["F"], WORDS["B"]: COLORS["B"], "a block is gathered": GATHER,
                         "gradients are waited for": REDUCE}, fontsize=9)
    save(figure, path)


def bars(step: TracedStep) -> Iterator[tuple[int, float, float, str, str]]:
    """List the bars of a step: row, start, end, color and label."""
    for kind in COMPUTING:
        yield from ((0, start, end, COLORS[kind], "") for start, end in step.computing(kind))
    for one in step.stream("communication"):
        if one.name == "gradients":
            yield 0, one.start, one.end, REDUCE, ""
    for one in step.stream("gathers"):
        yield 1, one.start, one.end, GATHER, one.name.removeprefix("blocks.") if "." in one.name else ""


if __name__ == "__main__":
    run(lambda: Prefetch.show(world()))
