"""Runs that begin with a model in transformers' layout, and folders that hold one: what their tests share."""
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpi_impl.checkpoints.huggingface import WEIGHTS, check_weights, join_shards, load_weights, places_of, save_model
from mpi_impl.checkpoints.huggingface_config import CONFIG, layout_in, layout_of, read_config
from mpi_impl.comm.topology import Place
from mpi_impl.data.tokenizer import NullTokenizer
from mpi_impl.inference.decoding import last_logits
from mpi_impl.inference.replica import trained_replica
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.replicas import join_replicas
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.errors import UserError
from reference.models.model import sequences_of
from reference.optimizers.adam import OptimizerConfig
from reference.params import leaves
from reference.precision import Precision
from shardlab.programs.settings import parse
from tests.cases import Case, close
from tests.checkpoints.golden import DECAY, GOLDEN, HEADS, RATE, weight
from tests.training_theorems import Plan, connected, dealt

GOLDEN_MODELS = json.loads(GOLDEN.read_text())
ODD_FIELDS = json.loads(Path(__file__).with_name("odd_fields.json").read_text())    # of config.json, with some values
T, P = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
OPTIMIZER = OptimizerConfig(RATE, 10, lr_decay_style="constant", weight_decay=DECAY, clip_grad=0.0)
DOUBLE = Precision("float64")


def taking_turns(models, places) -> list:
    """Return every model in every place. Each model is fast in one place, another for each; elsewhere it is deep."""
    return [pytest.param(model, *place, marks=[] if i == (4 * turn + len(models)) % len(places) else pytest.mark.deep)
            for i, place in enumerate(places) for turn, model in enumerate(models)]


# ---- folders --------------------------------------------------------------------------------------------------------


def write_model(folder: Path, config, tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


def weights_of(golden) -> dict[str, np.ndarray]:
    return {name: weight(name, shape) for name, shape in golden["tensors"].items()}


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def same_tensors(one: Path, other: Path):
    ours, theirs = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert (ours[name].dtype, ours[name].shape) == (theirs[name].dtype, theirs[name].shape)
        assert ours[name].tobytes() == theirs[name].tobytes(), name


def refuses(act, words: str):
    with pytest.raises(UserError) as caught:
        act()
    assert words in str(caught.value)


def options(folder, more="") -> list[str]:
    """Return the options of a run that begins with the model in the folder."""
    return ["--load-hf", str(folder), "--seq-length", "5", "--micro-batch-size", "1", *more.split()]


def model_in(folder, more="", **choices) -> ModelConfig:
    """Return the model in a folder, as the options of a run take it from there, with the heads that its class has, and
    with predictions at any number of positions.
    """
    layout, config = layout_in(str(folder))
    model = parse(options(folder, more), 1, layout.architecture).model(
        read_config(str(folder), layout.architecture)["vocab_size"])
    (class_name,) = config.get("architectures", [""])
    heads = ("span",) if class_name.endswith("ForQuestionAnswering") else HEADS.get(class_name, model.heads)
    if class_name.endswith("ForSequenceClassification"):
        heads = ("entailment",) if config.get("num_labels") == 3 else ("paraphrase",)
    return replace(model, **{"heads": heads, "predicted_share": 1.0} | choices)


# ---- on ranks -------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A model on some ranks."""

    model: ModelConfig
    t: int = 1
    d: int = 1
    plan: Plan = Plan()
    sequence_parallel: bool = False
    precision: Precision = DOUBLE

    @property
    def n(self) -> int:
        return self.t * self.plan.p * self.plan.c * self.d

    def parallel(self) -> ParallelConfig:
        return self.plan.parallel(self.n, Case(self.t, self.model, 1, 1, 1, sequence_parallel=self.sequence_parallel))

    def trainer(self, topology) -> Trainer:
        return Trainer(ModelState(self.model, topology, 1, self.precision), OPTIMIZER)

    def loaded(self, topology, folder) -> Trainer:
        check_weights(str(folder), self.model)
        trainer = self.trainer(topology)
        load_weights(trainer, str(folder))
        return trainer

    def step(self, trainer: Trainer, batch):
        """Take a step with a batch, dealt in microbatches of one sample."""
        return trainer.step(dealt(trainer, 1, batch), len(batch.tokens) // sequences_of(self.model))


class Found(NamedTuple):
    """One rank's results with the model in a folder, before some steps and after them."""

    place: Place
    losses: tuple[float, ...]
    logits: Any                # [s, V] of a GPT's first sequence, on the last stage's ranks
    gradients: Any             # of the first step, and
    after: Any                 # the weights after the last, as trees of what the rank holds
    tensors: Any


def compute_on(group, run: Run, folder, batches) -> Found:
    """Return a rank's results: the losses of the first batch and its gradients, and the weights after a step on each
    batch; and of a GPT the logits of the first sequence, token by token from the KV cache.
    """
    with connected(group, run.parallel()) as topology:
        trainer = run.loaded(topology, folder)
        logits = logits_from_cache(trainer, batches[0].tokens[0]) if run.model.architecture == "gpt" else None
        losses, gradients = [], []
        for batch in batches:
            losses.append(run.step(trainer, batch).losses)
            gradients.append(trainer.state.whole(trainer.state.gradients.own).copy())
        layout, weights = trainer.state.layout, trainer.state.whole(trainer.state.optimizer_states["parameters"])
        return Found(topology.place, losses[0], logits, layout.views(gradients[0]), layout.views(weights),
                     layout.tensors)


def logits_from_cache(trainer: Trainer, tokens):
    replica = trained_replica(trainer)
    kv_cache = replica.empty_kv_cache(len(tokens))
    logits = [last_logits(replica, [[token]], kv_cache) for token in tokens.tolist()]
    return None if logits[0] is None else np.concatenate(logits)


def learn_and_save(group, run: Run, folder, again, batches=()) -> None:
    """Load, take a step on each batch, and save."""
    with connected(group, run.parallel()) as topology:
        trainer = run.loaded(topology, folder)
        for batch in batches:
            run.step(trainer, batch)
        save_model(trainer, str(again), NullTokenizer(run.model.vocab_size - 1) if group.rank == 0 else None)


# ---- their results, compared with transformers' ---------------------------------------------------------------------


def agrees(ranks: list[Found], logits, losses, tolerance: float) -> None:
    """Compare the losses on every rank, and a GPT's logits on those that have them, with transformers'."""
    assert logits is None or any(one.logits is not None for one in ranks)
    for one in ranks:
        close(np.array(one.losses), np.array(losses), tolerance)
        if one.logits is not None:
            close(one.logits, np.array(logits), tolerance)


def tensors_agree(run: Run, ranks: list[Found], field: str, expected: dict, tolerance: float, measure=None) -> None:
    """Compare every replica's gradients, or its weights after the steps, with transformers', by their names there;
    or what `measure(name, tensor)` makes of them.
    """
    tensors = [next(found.tensors for found in ranks if found.place.pipeline == stage) for stage in range(run.plan.p)]
    for tree in join_replicas({one.place: getattr(one, field) for one in ranks}, tensors, run.parallel()):
        ours = in_their_layout(run.model, dict(leaves(tree)))
        assert ours.keys() == expected.keys()
        for name, x in ours.items():
            close(np.array(measure(name, x) if measure else x), np.array(expected[name]), tolerance)


def in_their_layout(model: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return whole tensors by transformers' names."""
    layout = layout_of(model)
    return {layout.full_name(name): x for ours, _, places in places_of(model)
            for name, x in zip(dict.fromkeys(place.name for place in places), join_shards([tensors[ours]], places))}
