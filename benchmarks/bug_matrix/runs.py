"""The runs that detectors observe: functions for the ranks of a pool, with a bug planted in them or without."""
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.bug_matrix.settings import BugSetting
from benchmarks.bug_matrix.texts import CharacterSamples
from mpi_impl.checkpoints import checkpoint, on_disk
from mpi_impl.comm.ledger import Entry, Total
from mpi_impl.comm.topology import Topology
from mpi_impl.parallel.model_state import Held, ModelState
from mpi_impl.parallel.pipeline import Pipeline
from mpi_impl.training.batches import Batches, whole_batch
from mpi_impl.training.trainer import StepResult, Trainer
from mpi_impl.training.verify import Verifier
from reference.errors import UserError
from reference.parallel.stages import schedule_of
from reference.schedules.simulate import activations_in_flight
from shardlab.compare.recorder import Recorder, facts_of
from shardlab.report.traffic import pipeline_ledger
from tests.cases import Case, Plan
from tests.training_theorems import connected

SAVED_AFTER = 10    # steps, where a run is saved and gone on with


class TrainingRun:
    """A trainer and its data on the ranks of a topology."""

    def __init__(self, topology: Topology, setting: BugSetting, case: Case, form: str):
        self.trainer = Trainer(ModelState(case.model, topology, case.seed, setting.precision(form)),
                               setting.optimizer)
        self.case, self.data = case, CharacterSamples(case.model, case.s)
        per_replica = setting.batch // topology.data.size
        self.batches = Batches(self.data if topology.place.tensor == 0 else None, case.model, topology, case.s, case.b,
                               per_replica // case.b)
        self.order = setting.order or schedule_of(topology.config, self.batches.microbatches)
        if setting.order:
            self.trainer.pipelines["training", self.batches.microbatches] = Pipeline(setting.order, topology)

    def step(self, observer=None) -> StepResult:
        """Train a step. Raises UserError if the run has diverged, as the program does."""
        number = self.trainer.iteration
        try:
            result = self.trainer.step(self.batches.microbatches_of("train", number), self.batches.global_batch_size,
                                       observer)
        except Exception as error:
            error.add_note(f"in step {number + 1}")
            raise
        if self.trainer.state.precision.compute != "float16" and not isfinite(result.grad_norm):
            raise UserError(f"The gradient's norm of iteration {number + 1} is {result.grad_norm}: the run has "
                            "diverged.")
        return result

    def evaluate(self) -> float:
        return sum(self.trainer.evaluate(self.batches.microbatches_of("validation", 0),
                                         self.batches.global_batch_size))


@contextmanager
def running(group, setting: BugSetting, saved_after: int, form: str = "") -> Iterator[TrainingRun]:
    """Yield a run, for as long as the `with` block lasts. If the setting has a checkpoint, the run goes on from it."""
    with connected(group, setting.plan.parallel(group.size, setting.case)) as topology:
        run = TrainingRun(topology, setting, setting.case, form)
        if setting.loads is None:
            yield run
            return
        case, plan = setting.loads
        with on_from_checkpoint(group, run, setting, case, plan, saved_after, form) as going_on:
            yield going_on


@contextmanager
def on_from_checkpoint(group, run: TrainingRun, setting: BugSetting, case: Case, plan: Plan, steps: int,
                       form: str) -> Iterator[TrainingRun]:
    """Train some steps, save, and yield the run that has loaded that; its own states begin with another seed."""
    mine = TemporaryDirectory() if group.rank == 0 else None
    with connected(group, plan.parallel(group.size, case)) as topology:
        try:
            root = group.broadcast_object(lambda: mine and mine.name)
            for _ in range(steps):
                run.step()
            checkpoint.save(run.trainer, root, {})
            going_on = TrainingRun(topology, setting, case, form)
            going_on.trainer.state.parameters.own.flat[...] = 0.5
            checkpoint.load(going_on.trainer, root, group.broadcast_object(lambda: on_disk.read_manifest(root)))
            group.ledger.totals.clear()
            yield going_on
        finally:
            if mine:
                mine.cleanup()


# ---- a training run -------------------------------------------------------------------------------------------------


class LearningCurve(NamedTuple):
    """The numbers that rank 0 prints, step by step."""

    losses: list[float]
    norms: list[float]


def train(group, setting: BugSetting, steps: int) -> LearningCurve:
    """Train, and return what is printed. Of a run with a checkpoint that is the second part alone."""
    with running(group, setting, SAVED_AFTER) as run:
        results = [run.step() for _ in range(steps - SAVED_AFTER if setting.loads else steps)]
        run.evaluate()
        return LearningCurve([float(result.loss) for result in results],
                             [float(result.grad_norm) for result in results])


# ---- the accounts of a short run ------------------------------------------------------------------------------------


class Accounts(NamedTuple):
    """The messages and the memory of a rank in a run of two steps and an evaluation."""

    called: bool                            # whether the bug's functions were
    ledger: dict[Entry, Total]              # of its pipeline
    simulator: str                          # a sentence about caches in flight that were not simulated, or ""
    memory: Held


def keep_accounts(group, setting: BugSetting) -> Accounts:
    group.ledger.totals.clear()
    called = []
    sys.setprofile(lambda frame, event, _: called.append(True) if not called and event == "call" and
                   frame.f_code.co_filename.endswith("with a planted bug>") else None)
    try:
        with running(group, setting, 2) as run:
            run.trainer.measured = True
            for _ in range(2):
                run.step()
            run.evaluate()
            peaks, topology = run.trainer.peaks.caches, run.trainer.topology
            expected = activations_in_flight(run.order)[topology.pipeline.rank]
            return Accounts(bool(called), dict(pipeline_ledger(topology).totals),
                            "" if peaks == expected else f"{peaks} caches in flight, where {expected} were simulated",
                            run.trainer.held())
    finally:
        sys.setprofile(None)


# ---- --verify, and a recording --------------------------------------------------------------------------------------


def verify(group, setting: BugSetting, forms: tuple[str, ...], steps: int) -> list[tuple[int, str]]:
    """Train beside the textbook; return for each format the step in which --verify ends the run, and its sentence."""
    found = []
    for form in forms:
        with running(group, setting, 2, form) as run:
            verifier = Verifier(run.trainer, setting.optimizer, run.case.seed)
            if setting.loads:
                verifier.take_over()
            found.append(next(verified_steps(run, verifier, steps), (0, "")))
    return found


def verified_steps(run: TrainingRun, verifier: Verifier, steps: int) -> Iterator[tuple[int, str]]:
    """Train, and yield each step that is not the textbook's, with the sentence."""
    world, b = run.trainer.topology.world, run.batches.global_batch_size
    for _ in range(steps):
        number, result = run.trainer.iteration, run.step()
        batch = whole_batch(run.data, run.case.model, "train", number, b) if world.rank == 0 else None
        try:
            verifier.check(batch, result)
        except UserError as error:
            yield number + 1, str(error)


def record(group, setting: BugSetting, form: str, first: int, steps: int):
    """Return the facts of the run, and the parts of tensors that this rank sees in steps after the first ones."""
    with running(group, setting, first, form) as run:
        if setting.loads is None:
            for _ in range(first):
                run.step()
        recorder, parts = Recorder(run.trainer.state), []
        for _ in range(steps):
            run.step(recorder)
            parts += recorder.pop_parts()
        return facts_of(run.trainer.state, setting.optimizer, run.batches.global_batch_size, run.case.s), parts


def call_here(group, function: Callable, *args) -> None:
    """Run a theorem that needs no ranks, on one."""
    function(*args)
