"""Runs of any model on any ranks that save their state and load it: what tests of checkpoints share."""
from dataclasses import replace
from typing import Any, NamedTuple

from mpi_impl.checkpoints import checkpoint, on_disk
from mpi_impl.comm.topology import Place
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.replicas import join_replicas
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.optimizers.adam import OptimizerConfig
from reference.params import split
from reference.precision import Precision
from reference.training import trainer as textbook
from tests.cases import Case, trees_close
from tests.program import refusal
from tests.training_theorems import Plan, connected, dealt

CHOICES = dict(lr=1e-2, lr_decay_iters=10, lr_warmup_iters=1, clip_grad=0.5, adam_eps=1e-4)
OPTIMIZER = OptimizerConfig(**CHOICES)
DOUBLE = Precision("float64")


class Run(NamedTuple):
    """A case on some ranks, with this many samples in a batch."""

    n: int
    case: Case
    plan: Plan
    batch: int
    precision: Precision = DOUBLE

    @property
    def optimizer(self) -> OptimizerConfig:
        return self.plan.optimizer(**CHOICES)

    def trainer(self, topology) -> Trainer:
        return Trainer(ModelState(self.case.model, topology, self.case.seed, self.precision), self.optimizer)

    def textbook(self) -> textbook.Trainer:
        """Return the same training in one process."""
        return textbook.Trainer(self.case.model, self.optimizer, self.case.seed, self.precision)

    def samples(self, step: int):
        """Return the global batch of a step."""
        return self.case.batch(str(step), self.batch)

    def step(self, trainer: Trainer):
        return trainer.step(dealt(trainer, self.case.b, self.samples(trainer.iteration)), self.batch)


class States(NamedTuple):
    """The states of one rank."""

    place: Place
    tensors: Any
    views: dict[str, Any]      # by state
    parallel: ParallelConfig


def states(trainer: Trainer) -> States:
    return States(trainer.topology.place, trainer.state.layout.tensors,
                  {name: trainer.state.layout.views(trainer.state.whole(buffer).copy())
                   for name, buffer in trainer.state.optimizer_states.items()}, trainer.topology.config)


def join_replica(everyone: list[States], state: str, replica: tuple[int, int] = (0, 0)):
    """Return this state of the whole model, from the ranks of one replica, and those with other experts."""
    parallel, (context, data) = everyone[0].parallel, replica
    tensors = [next(found.tensors for found in everyone if found.place.pipeline == stage)
               for stage in range(parallel.pipeline_model_parallel_size)]
    wholes = list(join_replicas({found.place: found.views[state] for found in everyone}, tensors, parallel))
    whole = wholes[context + parallel.context_parallel_size * data]
    for found in everyone:
        if found.place.replica == replica and found.views[state].embedding.word is not None:    # a tied table's copies
            trees_close(found.views[state].embedding.word,
                        split(whole.embedding.word, found.tensors.embedding.word,
                              parallel.tensor_model_parallel_size)[found.place.tensor], 0.0)
    return whole


def train_and_save(group, run: Run, root, steps: int = 1) -> States:
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer = run.trainer(topology)
        for _ in range(steps):
            run.step(trainer)
        checkpoint.save(trainer, str(root), {"seed": run.case.seed})
        return states(trainer)


def load_and_train(group, run: Run, root, steps: int = 1) -> tuple[States, list, States]:
    """Return the states after loading, the results of some steps, and the states after them."""
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer = run.trainer(topology)
        checkpoint.load(trainer, str(root), group.broadcast_object(lambda: on_disk.read_manifest(str(root))))
        loaded = states(trainer)
        return loaded, [run.step(trainer) for _ in range(steps)], states(trainer)


SMALL = Run(2, Case(2, ModelConfig(2, 8, 2, 11, 4, make_vocab_size_divisible_by=3), 1, 4, seed=1), Plan(), 2)
ALONE = SMALL._replace(n=1, case=replace(SMALL.case, t=1))


def load_says(ranks, run: Run, root) -> str:
    """Return the sentence with which a load is refused; "" if it loads."""
    return ranks.run(run.n, refusal, load_and_train, run, root, 0)[0]
