"""Runs that begin with a GPT-2 in transformers' layout, and folders that hold one: what their tests share."""
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpi_impl.checkpoints.gpt2_layout import GPT2, their_name
from mpi_impl.checkpoints.huggingface import WEIGHTS, check_weights, load_weights, save_model
from mpi_impl.checkpoints.huggingface_config import CONFIG, read_config
from mpi_impl.comm.topology import Place
from mpi_impl.data.tokenizer import NullTokenizer
from mpi_impl.generation.decoding import last_logits
from mpi_impl.generation.replica import trained_replica
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.programs.arguments import parse
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.errors import UserError
from reference.models.stage import join_stages
from reference.params import join, join_experts, leaves
from tests.checkpoints.gpt2_golden import GOLDEN, weight
from tests.training_theorems import connected, dealt

GOLDEN_MODELS = json.loads(GOLDEN.read_text())
T, P = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


def taking_turns(models, places) -> list:
    """Return every model in every place. Each place has one fast model, in turn; the others are marked deep."""
    return [pytest.param(model, *place, marks=[] if i % len(models) == turn else pytest.mark.deep)
            for i, place in enumerate(places) for turn, model in enumerate(models)]


class Found(NamedTuple):
    """One rank's results with the model in a folder."""

    place: Place
    loss: float
    logits: Any      # [s, V] of the first sequence, on the last stage's ranks
    grads: Any       # the tree of what it holds
    tensors: Any


def options(folder, more="") -> list[str]:
    """Return the options of a run in float64 that begins with the model in the folder."""
    return ["--load-hf", str(folder), "--seq-length", "4", "--micro-batch-size", "1", "--dtype", "float64",
            "--clip-grad", "0", *more.split()]


def trainer_of(settings, topology) -> Trainer:
    folder = settings.args.load_hf
    model = settings.model(read_config(folder, "gpt")["vocab_size"])
    check_weights(folder, model)
    trainer = Trainer(ModelState(model, topology, 1, settings.precision), settings.optimizer)
    load_weights(trainer, folder)
    return trainer


def compute_on(group, argv, tokens) -> Found:
    """Return a rank's results: logits of the first sequence, the loss of all sequences, [B, s + 1], and its gradients.
    """
    settings = parse(argv, group.size)
    with connected(group, settings.parallel) as topology:
        trainer = trainer_of(settings, topology)
        replica = trained_replica(trainer)
        logits = [last_logits(replica, tokens[:1, :n].tolist(), replica.empty_kv_cache(n))
                  for n in range(1, tokens.shape[1])]
        result = trainer.step(dealt(trainer, 1, GPTBatch.unpack(tokens)), len(tokens))
        grads = trainer.state.layout.views(trainer.state.whole(trainer.state.gradients.own))
        return Found(topology.place, result.loss, logits, grads, trainer.state.layout.tensors)


def learn_and_save(group, argv, steps, folder) -> None:
    """Load, learn for some steps, and save."""
    settings = parse(argv, group.size)
    with connected(group, settings.parallel) as topology:
        trainer = trainer_of(settings, topology)
        for step in range(steps):
            tokens = np.random.default_rng(step).integers(0, trainer.state.model.vocab_size, (topology.data.size, 5))
            trainer.step(dealt(trainer, 1, GPTBatch.unpack(tokens)), len(tokens))
        tokenizer = NullTokenizer(trainer.state.model.vocab_size - 1) if group.rank == 0 else None
        save_model(trainer, str(folder), tokenizer)


def whole_gradients(ranks: list[Found], e: int = 1) -> dict[str, np.ndarray]:
    """Return the first replica's whole gradients, by our names, with the experts of the first e."""
    stages = []
    for p in sorted({found.place.pipeline for found in ranks}):
        held = [[found for found in ranks if found.place.pipeline == p and found.place.data == data]
                for data in range(e)]
        tensors = held[0][0].tensors
        stages.append(join_experts([join([found.grads for found in replica], tensors) for replica in held], tensors))
    return dict(leaves(join_stages(stages)))


def full_name(name: str) -> str:
    """Return transformers' name of our tensor, with the prefix."""
    return GPT2.full_name(their_name(name))


def weights_of(golden) -> dict[str, np.ndarray]:
    return {name: weight(name, shape) for name, shape in golden["tensors"].items()}


def write_model(folder: Path, config, tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    return folder


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def same_tensors(one: Path, other: Path):
    ours, theirs = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert (ours[name].dtype, ours[name].shape) == (theirs[name].dtype, theirs[name].shape)
        assert ours[name].tobytes() == theirs[name].tobytes(), name


def refuses(act, sentence: str):
    with pytest.raises(UserError) as caught:
        act()
    assert sentence in str(caught.value)
