"""The overlap of gathering and computing in ZeRO-3: `mpirun -np 4 python -m mpi_impl.experiments.prefetch`.

A GPT trains on ranks that shard its parameters, so that each block is gathered before it computes. With prefetch this
begins while the block before computes; without, when the parameters are needed. Both ways compute the same. How much of
the gathers' time is hidden behind computing depends on how long they take, so that is varied.

The time is that of the virtual clock (mpi_impl/comm/clock.py): computing takes the CPU time that it takes here, and a
message what a link of a chosen speed takes. Ranks that share a machine's cores cannot show the overlap by the wall's
clock, since a core that copies a message does not compute.
"""
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Slice
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group, parse_given
from mpi_impl.models.units import Unit
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.zero import GatheredUnit
from mpi_impl.report.timelines.tracing import TracedSteps
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import aligned
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ModelConfig, ParallelConfig, require_positive
from reference.costs.hardware import Link
from reference.errors import UserError
from reference.optimizer import OptimizerConfig
from reference.params import tree_map
from reference.precision import Precision

NUMBERS, POSITIONS, SAMPLES, HEADS = 32, 64, 2, 4       # V, s, b, a
IMMEDIATE = Link(0.0, np.inf)


@option_group
class PrefetchOptions:
    """The model, its steps, and the speed of messages."""

    num_layers: int = option_field(6, metavar="L")
    hidden_size: int = option_field(256, metavar="H")
    steps: int = option_field(5, "in each way")
    message_time: tuple[float, ...] = option_field(
        (0.5, 1.0, 2.0), "the time to gather a block, as a multiple of its forward's (default: 0.5 1.0 2.0); the "
        "picture shows the first", "R")
    plot: str = option_field("prefetch.png", metavar="F")


class Gather(NamedTuple):
    """The gathering of a unit: from when to when the message travels, and when the rank begins to wait for it."""

    unit: str
    start: float
    end: float
    wanted: float


class TracedStep(NamedTuple):
    """One step of one rank."""

    gathers: list[Gather]
    slices: list[Slice]
    loss: float

    @property
    def waits(self) -> list[Slice]:
        return [one for one in self.slices if one.stream == "communication"]

    @property
    def seconds(self) -> float:
        return max(one.end for one in self.slices) - min(one.start for one in self.slices)

    def action(self, kind: str) -> Slice:
        """Return the forward (F) or the backward (B) of the step's only microbatch."""
        return next(one for one in self.slices if one.kind == kind)


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    args = parse_options(argv, ranks.size)
    ranks.broadcast_object(lambda: check_outputs(args))
    forward = forward_of_a_block(ranks, args)
    found: dict[tuple[float, bool], list[list[TracedStep]]] = {}
    for ratio in args.message_time:
        for early in (False, True):
            steps = train(ranks, args, early, ratio * forward)
            found[ratio, early] = ranks.allgather_objects(steps)
    if ranks.rank == 0:
        print(f"{args.num_layers} blocks on {ranks.size} ranks; a block's forward takes {1e3 * forward:.2f} ms\n\n"
              f"{table(found, args.num_layers)}\n")
        from mpi_impl.experiments.prefetch_picture import draw_prefetch  # matplotlib takes a second to import
        ratio = args.message_time[0]
        draw_prefetch(args.plot, {name: found[ratio, early][0][-1] for name, early in (
            ("without prefetch", False), ("with prefetch", True))})
        print(f"rank 0's last step, where a gather takes {ratio:g} of a forward, is drawn in {args.plot}", flush=True)
    ranks.allgather_objects(None)


def parse_options(argv: Sequence[str] | None, ranks: int) -> PrefetchOptions:
    description = "Measure how much of ZeRO-3's gathering is hidden behind computing, with and without prefetch."
    args = PrefetchOptions(**parse_given("mpi_impl.experiments.prefetch", description, PrefetchOptions, argv))
    for name in ("num_layers", "hidden_size", "steps"):
        require_positive(name, getattr(args, name))
    if min(args.message_time) <= 0:
        raise UserError(f"--message-time is {' '.join(f'{each:g}' for each in args.message_time)}, but each must be a "
                        "number above 0.")
    if ranks == 1:
        raise UserError("A rank alone gathers nothing. Start at least 2 ranks.")
    return args


# ---- steps on ranks -------------------------------------------------------------------------------------------------


class WatchedUnit(Unit):
    """A unit whose gathers are noted, and which begins them only when they are wanted if it is not `early`."""

    def __init__(self, unit: GatheredUnit, early: bool, found: list[Gather]):
        self.unit, self.early, self.found = unit, early, found

    def prefetch(self) -> None:
        if self.early:
            self.unit.prefetch()

    def wait(self):
        wanted = self.unit.parameters.group.trace.clock.now()
        self.unit.prefetch()
        tensors = self.unit.wait()
        for pending in self.unit.pending or ():
            start = float(pending.stamp[0])
            self.found.append(Gather(self.unit.name, start, start + pending.takes, wanted))
        return tensors

    def release(self) -> None:
        self.unit.release()


def train(ranks: Group, args: PrefetchOptions, early: bool, seconds: float) -> list[TracedStep]:
    """Return this rank's steps, after one that nobody watches. To gather a block takes so many `seconds`."""
    model = ModelConfig(args.num_layers, args.hidden_size, HEADS, NUMBERS, POSITIONS, make_vocab_size_divisible_by=1,
                        hidden_dropout=0, attention_dropout=0, untie_embeddings_and_output_weights=True)
    topology = connect(ranks, ParallelConfig(data_parallel_size=ranks.size, zero_stage=3))
    trainer = Trainer(ModelState(model, topology, seed=1, precision=Precision("float32")), OptimizerConfig(1e-3, 100))
    gathers: list[Gather] = []
    trainer.state.stage_params = {
        stage: tree_map(lambda unit: WatchedUnit(unit, early, gathers), units)
        for stage, units in trainer.state.stage_params.items()}
    block = trainer.state.layout.bucket_of["blocks.0"].size * trainer.state.device_prototype.itemsize
    link = Link(0.0, block * (ranks.size - 1) / ranks.size / seconds) if seconds else IMMEDIATE
    traced, found = TracedSteps(topology, VirtualClock(link, memory=1)), []
    for step in range(args.steps + 1):
        gathers.clear()
        with traced.step():
            result = trainer.step([batch(step, ranks.rank)], SAMPLES * ranks.size)
        found.append(TracedStep(list(gathers), traced.steps[-1], result.loss))
    disconnect(topology)
    return found[1:]


def batch(step: int, rank: int) -> GPTBatch:
    """Draw a rank's samples: sequences that count on from a number."""
    first = np.random.default_rng([step, rank]).integers(NUMBERS, size=(SAMPLES, 1))
    return GPTBatch.unpack((first + np.arange(POSITIONS + 1)) % NUMBERS)


def forward_of_a_block(ranks: Group, args: PrefetchOptions) -> float:
    """Return the median seconds of a block's forward, where messages take no time."""
    steps = ranks.allgather_objects(train(ranks, args, True, 0.0))
    forwards = [step.action("F") for of_rank in steps for step in of_rank]
    return median(one.end - one.start for one in forwards) / args.num_layers


# ---- what is hidden -------------------------------------------------------------------------------------------------


def hidden(gather: Gather, waits: Iterable[Slice]) -> float:
    """Return the seconds of a gather during which its rank computes: until the rank wants it, less other waits."""
    start, end = gather.start, min(gather.end, gather.wanted)
    return max(0.0, end - start - sum(max(0.0, min(one.end, end) - max(one.start, start)) for one in waits))


def hidden_share(steps: Iterable[TracedStep], kind: str) -> float:
    """Return the share of the time of the blocks' gathers that is hidden in the forwards (F) or the backwards (B)."""
    together = behind = 0.0
    for step in steps:
        action = step.action(kind)
        for gather in step.gathers:
            if gather.unit.startswith("blocks.") and action.start <= gather.wanted <= action.end:
                together += gather.end - gather.start
                behind += hidden(gather, step.waits)
    return behind / together


def table(found: dict[tuple[float, bool], list[list[TracedStep]]], layers: int) -> str:
    """Tabulate the steps' time and the hidden shares; the prediction is for forwards of equal length, backwards twice
    as long, and nothing to hide the first gather behind.
    """
    rows = [["gather / forward", "prefetch", "ms a step", "hidden, forward", "predicted", "hidden, backward",
             "predicted"]]
    for (ratio, early), ranks in found.items():
        steps = [step for of_rank in ranks for step in of_rank]
        shares = []
        for kind, computing in (("F", 1), ("B", 2)):
            predicted = early * (layers - 1) / layers * min(1, computing / ratio)
            shares += [f"{hidden_share(steps, kind):.0%}", f"{predicted:.0%}"]
        rows.append([f"{ratio:g}", "yes" if early else "no",
                     f"{1e3 * median(step.seconds for step in steps):.1f}", *shares])
    return aligned(rows)


if __name__ == "__main__":
    run(lambda: show(world()))
