"""Runs that begin with a BERT in transformers' layout: what their tests share."""
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from mpi_impl.checkpoints.huggingface import check_weights, join_shards, load_weights, places_of, save_model
from mpi_impl.checkpoints.huggingface_config import layout_of, model_of, read_config
from mpi_impl.comm.topology import Place
from mpi_impl.data.tokenizer import NullTokenizer
from mpi_impl.models import bert
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.models.model import sequences_of
from reference.models.stage import join_stages
from reference.optimizer import OptimizerConfig
from reference.parallel.data_parallel import samples_of
from reference.params import join, leaves
from reference.precision import Precision
from tests.cases import Case, close
from tests.training_theorems import Plan, connected, dealt


def model_in(folder, heads: tuple[str, ...], **choices) -> ModelConfig:
    """Return the model in a folder of transformers', without dropout."""
    config = read_config(str(folder), "bert")
    return model_of(config, architecture="bert", heads=heads, hidden_dropout=0.0, attention_dropout=0.0, **choices)


class Run(NamedTuple):
    """A model on some ranks."""

    model: ModelConfig
    t: int = 1
    d: int = 1
    plan: Plan = Plan()
    sequence_parallel: bool = False

    @property
    def n(self) -> int:
        return self.t * self.plan.p * self.d

    def parallel(self):
        return self.plan.parallel(self.n, Case(self.t, self.model, 1, 1, 1, sequence_parallel=self.sequence_parallel))

    def trainer(self, topology, seed: int = 1) -> Trainer:
        return Trainer(ModelState(self.model, topology, seed, Precision("float64")),
                       OptimizerConfig(1e-2, 10, clip_grad=0.0))


class Found(NamedTuple):
    """One rank's results with the model in a folder."""

    place: Place
    losses: tuple[float, ...]
    logits: dict[str, list]    # by head, of each of the replica's samples; on the last stage's ranks
    grads: Any                 # the tree of what it holds
    tensors: Any


def loaded(run: Run, topology, folder) -> Trainer:
    check_weights(str(folder), run.model)
    trainer = run.trainer(topology)
    load_weights(trainer, str(folder))
    return trainer


def compute_on(group, run: Run, folder, batch) -> Found:
    """Return a rank's logits, losses and gradients of a batch, dealt in microbatches of one sample."""
    with connected(group, run.parallel()) as topology:
        trainer = loaded(run, topology, folder)
        size = len(batch.tokens) // sequences_of(run.model)
        mine = dealt(trainer, 1, batch)
        logits = logits_of(trainer, mine, size)
        result = trainer.step(mine, size)
        grads = trainer.state.layout.views(trainer.state.whole(trainer.state.gradients.own))
        return Found(topology.place, result.losses, logits, grads, trainer.state.layout.tensors)


def logits_of(trainer: Trainer, microbatches, size: int) -> dict[str, list]:
    """Return the logits of an evaluation, on the ranks that compute its losses."""
    words: list[Any] = []
    pooled: list[Any] = []
    cross_entropy, pooled_forward = bert.cross_entropy_forward, bert.pooled_forward

    def of_words(logits, targets, group):
        words.append(group.all_gather(logits.copy(), -1, "logits")[..., :trainer.state.model.vocab_size])
        return cross_entropy(logits, targets, group)

    def of_first(*args):
        y, cache = pooled_forward(*args)
        pooled.append(y)
        return y, cache

    with mock.patch.object(bert, "cross_entropy_forward", of_words), mock.patch.object(bert, "pooled_forward",
                                                                                       of_first):
        trainer.evaluate(microbatches, size)
    return {head: words if head == "lm" else pooled for head in trainer.state.model.heads}


def agrees(run: Run, found: list[Found], expected, tolerance: float) -> None:
    """Compare the losses on every rank, and the logits of every replica, with transformers' (`expected`)."""
    logits, losses = expected
    for one in found:
        close(np.array(one.losses), np.array(losses), tolerance)
        for head, each in one.logits.items():
            for k, ours in enumerate(each):
                samples = samples_of(one.place.data, k, run.d, 1)
                theirs = np.asarray(logits[head])[samples]
                if head == "lm" or not run.sequence_parallel or one.place.tensor == 0:   # who has the first position
                    close(ours.reshape(theirs.shape), theirs, tolerance)
    for head in run.model.heads:
        assert any(one.logits[head] for one in found)


def gradients_of(run: Run, ranks: list[Found]) -> dict[str, np.ndarray]:
    """Return the first replica's gradients, in transformers' layout."""
    replica = [found for found in ranks if found.place.data == 0]
    stages = [[found for found in replica if found.place.pipeline == p]
              for p in sorted({found.place.pipeline for found in replica})]
    whole = dict(leaves(join_stages([join([found.grads for found in stage], stage[0].tensors) for stage in stages])))
    layout = layout_of(run.model)
    return {layout.full_name(name): grad for ours, _, places in places_of(run.model)
            for name, grad in zip(dict.fromkeys(place.name for place in places), join_shards([whole[ours]], places))}


def learn_and_save(group, run: Run, folder, steps: int, again, batch=None) -> None:
    """Load, learn for some steps, and save."""
    with connected(group, run.parallel()) as topology:
        trainer = loaded(run, topology, folder)
        for _ in range(steps):
            trainer.step(dealt(trainer, 1, batch), len(batch.tokens) // sequences_of(run.model))
        save_model(trainer, str(again), NullTokenizer(run.model.vocab_size - 1) if group.rank == 0 else None)
