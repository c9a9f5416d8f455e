"""Runs that are recorded in memory: the same tiny training on any topology, with a bug planted in it or without."""
import numpy as np

from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.pipeline import Pipeline
from mpi_impl.training.batches import Batches
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.precision import LossScaling, Precision
from reference.schedules.actions import Schedule
from shardlab.compare.recorder import RecordedSteps, Recorder, facts_of
from shardlab.compare.recording import Recording, TensorPart, in_memory
from tests.cases import Case
from tests.planted import Bug, planted_run
from tests.training_theorems import Plan, connected

# Four heads and 10 words, so that the last of two or four ranks has a table that ends in padding.
MODEL = ModelConfig(4, 8, 4, 10, 6, make_vocab_size_divisible_by=3)
SEQUENCE, BATCH = 4, 4
ALONE = Plan()


def case(t=1, cut=False, model=MODEL) -> Case:
    return Case(t, model, 1, SEQUENCE, seed=7, sequence_parallel=cut)


class Corpus:
    """A data set of random samples: number i is the same, whoever asks for it."""

    def __init__(self, of: Case):
        n = 3 * BATCH
        self.rows = of.ids("words", n, of.s + 1) if of.model.architecture == "gpt" else of.batch("words", n).pack()

    def batch(self, part, first, count):
        return self.rows[first:first + count]


def trainer_of(of: Case, topology, form="float64", plan: Plan = ALONE) -> Trainer:
    """Return a trainer whose gradients are clipped, and whose eps exceeds the rounding error of the key bias's
    gradient, which is exactly zero.
    """
    optimizer = plan.optimizer(1e-2, 10, lr_warmup_iters=1, clip_grad=0.05, adam_eps=1e-4)
    scaling = LossScaling(loss_scale=2.0**16 if form == "float16" else 1.0)
    return Trainer(ModelState(of.model, topology, of.seed, Precision(form, scaling)), optimizer)


def batches_of(of: Case, topology) -> Batches:
    corpus = Corpus(of) if topology.place.tensor == 0 else None
    return Batches(corpus, of.model, topology, of.s, of.b, BATCH // (of.b * topology.data.size))


def recorded(group, of: Case, plan: Plan, order: Schedule | None, steps: int, form: str):
    """Run on a rank; return the facts of the run, the parts that this rank has seen, and what it did in each step."""
    with connected(group, plan.parallel(group.size, of)) as topology:
        trainer, batches = trainer_of(of, topology, form, plan), batches_of(of, topology)
        if order is not None:
            trainer.pipelines["training", batches.microbatches] = Pipeline(order, topology)
        recorder, taken, played = Recorder(trainer.state), [], []
        for step in range(steps):
            with recorder.playing():
                trainer.step(batches.microbatches_of("train", step), BATCH, recorder)
            taken += recorder.pop_parts()
            played.append(recorder.played)
        return facts_of(trainer.state, trainer.optimizer.config, BATCH, of.s), taken, played


def record(ranks, n: int, of: Case, plan: Plan = ALONE, order: Schedule | None = None, steps=2, bug: Bug | None = None,
           form="float64") -> Recording:
    """Record a run on n ranks of the pool. With `order` a pipeline's stages do their work in that order."""
    job = (recorded, of, plan, order, steps, form)
    found = ranks.run(n, *job) if bug is None else ranks.run(n, planted_run, bug, *job)
    return in_memory(found[0][0], [one for _, taken, _ in found for one in taken],
                     {i: list(each) for i, each in enumerate(zip(*(played for *_, played in found)), 1)})


def written(group, of: Case, plan: Plan, folder: str, steps: int, form: str):
    """Record a run on disk, on a rank; return its facts, the parts that this rank has seen, and the printed lines."""
    with connected(group, plan.parallel(group.size, of)) as topology:
        trainer, batches = trainer_of(of, topology, form), batches_of(of, topology)
        about, said = facts_of(trainer.state, trainer.optimizer.config, BATCH, of.s), []
        recorded, taken = RecordedSteps(trainer.state, folder, about, said.append), []
        for step in range(steps):
            observer = recorded.observer
            with recorded.playing():
                trainer.step(batches.microbatches_of("train", step), BATCH, observer)
            if observer is not None:
                taken += [(key, part, values) for (key, _), (part, values) in observer.seen.items()]
            recorded.write()
        return about, taken, said


def bits(recording: Recording) -> dict:
    """Return every tensor's values, by key."""
    return {key: bits_of(recording, parts) for key, parts in recording.parts.items()}


def bits_of(recording: Recording, parts: list[TensorPart]) -> dict:
    """Return the bits of the parts of one tensor."""
    return {(part.rank, part.first): np.array(recording.load(part)).tobytes() for part in parts}
