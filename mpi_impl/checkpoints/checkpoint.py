"""Save a run, and go on from there, on as many ranks as one likes.

What a rank owns of the optimizer's states it saves as boxes of whole tensors (reference/parallel/boxes.py), whatever
the topology. Who loads looks up which stored boxes meet its own, and reads just those parts: no rank holds more of the
model than in training, but for its part of one tensor at a time. Of what several ranks have alike one saves it (the
replicas' copies without ZeRO, replicated tensors, a tied word table), and all load it.

The order of the data, dropout and the learning rate are functions of the seed and of two counters: those are saved.
"""
import os
import time
from dataclasses import asdict
from math import prod
from typing import Any

import numpy as np

from mpi_impl.checkpoints import on_disk
from mpi_impl.checkpoints.manifest import Manifest, Sealed, Stored, file_of, key_of, state_of
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.runtime.arrays import moved_to, to_host
from mpi_impl.runtime.tables import bytes_of
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, option
from reference.errors import UserError
from reference.models.model import model_tensors
from reference.parallel.boxes import Box, boxes_of_piece, shape_of, without_padding
from reference.parallel.layout import Piece
from reference.params import leaves
from reference.precision import rounded

# What a ModelConfig says about training, about the first weights and about storage. The rest is the model.
NOT_THE_MODEL = {"hidden_dropout", "attention_dropout", "fp16_lm_cross_entropy", "init_method_std",
                 "make_vocab_size_divisible_by"}

# How a field is called that is no option.
WORDS = {"vocab_size": "--vocab-size (which the tokenizer decides)", "architecture": "The architecture",
         "heads": "The list of heads"}

TOKENIZER = "the tokenizer"      # its fingerprint's name among the settings
OF_THAT_RUN = ("Give the --vocab-size, the --tokenizer-type, and the --data-path that it was trained on or its "
               "--vocab-file and --merge-file, of the run that was saved.")


def model_of(model: ModelConfig) -> dict[str, Any]:
    """As JSON has it, which knows no tuples."""
    return {name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(model).items() if name not in NOT_THE_MODEL}


# ---- save -----------------------------------------------------------------------------------------------------------


def save(trainer: Trainer, root: str, settings: dict[str, Any]) -> str:
    """Called by all ranks between two steps -> a line about it. Raises UserError, on all alike, if it goes wrong.

    The last good checkpoint is then still there, and still the last.
    """
    began, world = time.perf_counter(), trainer.topology.world
    aside = world.broadcast_object(lambda: on_disk.make_aside(root, trainer.iteration), "a folder for the checkpoint")
    try:
        saved = world.collect_objects(lambda: save_shards(trainer, aside), "the checkpoint's shards")
        manifest = world.broadcast_object(lambda: finish(trainer, root, aside, settings, saved),
                                          "the checkpoint's manifest")
    except UserError:
        world.broadcast_object(lambda: on_disk.discard(aside), "the end of what could not be saved")
        raise
    return (f"saved iteration {trainer.iteration}: {bytes_of(manifest.size)} in "
            f"{time.perf_counter() - began:.1f} s, {on_disk.folder_of(root, trainer.iteration)}")


def save_shards(trainer: Trainer, aside: str) -> tuple[list[tuple[str, Box]], dict[str, Sealed]]:
    """A file for each state of what this rank saves -> of which tensors which boxes, and the files."""
    place, rank = trainer.topology.place, trainer.topology.world.rank
    pieces = without_padding(trainer.saved, place.tensor)
    boxes = [(piece.of.name, box) for piece in pieces for box in boxes_of_piece(piece, place.tensor)]
    if not boxes:
        return [], {}
    shapes = {key_of(name, box): shape_of(box) for name, box in boxes}
    names = {file_of(state, rank): state for state in trainer.optimizer.states}
    return boxes, {name: on_disk.write_tensors(os.path.join(aside, name), trainer.precision.main, shapes,
                                             (finite(trainer, piece, state) for piece in pieces))
                   for name, state in names.items()}


def finite(trainer: Trainer, piece: Piece, state: str):
    """A piece's elements, on the host. Raises UserError if they are of no use to anyone, or as the model's weights."""
    values, form = to_host(trainer.optimizer.states[state].load(piece)), trainer.precision.form
    weights = state == "parameters"
    if not np.isfinite(rounded(values, form) if weights else values).all():
        what = f"{piece.of.name} infinite in {form.name}" if weights else f"Adam's {state} of {piece.of.name} infinite"
        raise UserError(f"Iteration {trainer.iteration} has made {what}, or no number, on rank "
                        f"{trainer.topology.world.rank}: the run has diverged, and no checkpoint of it is saved. Try a "
                        "smaller --lr, or a longer warm-up (--lr-warmup-iters).")
    return values


def finish(trainer: Trainer, root: str, aside: str, settings: dict[str, Any], saved: list) -> Manifest:
    """On rank 0, when all shards are written: what all ranks have saved makes the manifest."""
    tensors = {name: Stored(tensor.shape, []) for name, tensor in leaves(model_tensors(trainer.model))}
    sealed: dict[str, Sealed] = {}
    for rank, (boxes, its_files) in enumerate(saved):
        sealed |= its_files
        for name, box in boxes:
            tensors[name].boxes.append((box, rank))
    follows = trainer.scaler.scaling.loss_scale is None
    manifest = Manifest(trainer.iteration, trainer.optimizer.iteration,
                        trainer.scaler.state if follows else None, trainer.precision.main,
                        model_of(trainer.model), settings, tensors, sealed)
    on_disk.publish(root, aside, manifest)
    return manifest


# ---- load -----------------------------------------------------------------------------------------------------------


def load(trainer: Trainer, root: str, manifest: Manifest) -> None:
    """Called by all ranks before the first step. Raises UserError, on all alike, for a file that is not as it was."""
    check_model(root, manifest, trainer.model)
    load_states(trainer, root, manifest, list(trainer.optimizer.states))
    trainer.iteration, trainer.optimizer.iteration = manifest.iteration, manifest.updates
    if manifest.loss_scale is not None and trainer.scaler.scaling.loss_scale is None:
        trainer.scaler.state = manifest.loss_scale
    trainer.take_over()


def load_weights(trainer: Trainer, root: str, manifest: Manifest) -> list[str]:
    """The parameters alone, for a model that may have other heads. Called by all ranks before the first step.

    -> the tensors that the checkpoint has not, which keep their initial values. Those that the model has not are passed
    over; moments and counters stay 0. Raises UserError, on all ranks alike, as `load` does.
    """
    check_model(root, manifest, trainer.model, other_heads=True)
    load_states(trainer, root, manifest, ["parameters"])
    trainer.take_over()
    return [name for name, _ in leaves(model_tensors(trainer.model)) if name not in manifest.tensors]


def check_model(root: str, manifest: Manifest, model: ModelConfig, other_heads: bool = False) -> None:
    """Raises UserError if the checkpoint is another model's; or, if it may have them, one that differs in more than its
    heads.
    """
    for name, value in model_of(model).items():
        saved = manifest.model.get(name)
        if saved != value and not (other_heads and name == "heads"):
            raise UserError(f"{WORDS.get(name, option(name))} is {value}, but {saved} in "
                            f"{on_disk.folder_of(root, manifest.iteration)}: that is a checkpoint of another model.")


def check_tokenizer(root: str, manifest: Manifest, tokenizer: Tokenizer, advice: str = OF_THAT_RUN) -> None:
    """Raises UserError, with advice, if the model has learnt what another tokenizer's ids mean."""
    if manifest.settings.get(TOKENIZER, tokenizer.fingerprint) != tokenizer.fingerprint:
        size, saved = tokenizer.vocab_size, manifest.model["vocab_size"]
        sizes = f" (it has {size:,} tokens, that one {saved:,})" if size != saved else ""
        raise UserError(f"The tokenizer is another one than that of {on_disk.folder_of(root, manifest.iteration)}"
                        f"{sizes}, so that the same ids mean other words. {advice}")


def check_iterations(root: str, manifest: Manifest, train_iters: int) -> None:
    """Raises UserError if nothing is left to do."""
    if manifest.iteration >= train_iters:
        raise UserError(f"--train-iters is {train_iters}, but {on_disk.folder_of(root, manifest.iteration)}, which is "
                        f"to be loaded, has {manifest.iteration} behind it: nothing is left to do. Choose more.")


def check_files(root: str, folder: str, sealed: dict[str, Sealed]) -> None:
    for name, file in sealed.items():
        on_disk.check_file(root, folder, name, file)


def load_states(trainer: Trainer, root: str, manifest: Manifest, states: list[str]) -> None:
    """On all ranks, once all files of these states are found to be as they were."""
    world, folder = trainer.topology.world, on_disk.folder_of(root, manifest.iteration)
    files = [(name, file) for name, file in manifest.files.items() if state_of(name) in states]
    world.collect_objects(lambda: check_files(root, folder, dict(files[world.rank::world.size])),
                    "the checkpoint's checksums")
    world.collect_objects(lambda: read_states(trainer, folder, manifest, states), "what the checkpoint holds")


def read_states(trainer: Trainer, folder: str, manifest: Manifest, states: list[str]) -> None:
    """What this rank owns of the tensors that are there, piece by piece. (Padding is not stored, and stays 0.)"""
    for state in states:
        buffer, reader = trainer.optimizer.states[state], on_disk.StateReader(folder, state, manifest)
        for piece in without_padding(trainer.pieces, trainer.topology.place.tensor):
            if piece.of.name in manifest.tensors:
                buffer.store(piece, moved_to(load_piece(trainer, reader, piece), trainer.main))


def load_piece(trainer: Trainer, reader: on_disk.StateReader, piece: Piece):
    """Its elements, [piece.size], in the dtype of this run."""
    values, start = np.empty(piece.size, trainer.main.dtype), 0
    for box in boxes_of_piece(piece, trainer.topology.place.tensor):
        shape = shape_of(box)
        reader.read(piece.of.name, box, values[start:start + prod(shape)].reshape(shape))
        start += prod(shape)
    return values


def told(root: str, manifest: Manifest, settings: dict[str, Any], dtype: str) -> str:
    """What is loaded, and how this run differs from the one that saved it, for a person."""
    folder = on_disk.folder_of(root, manifest.iteration)
    lines = [f"loaded iteration {manifest.iteration}: {bytes_of(manifest.size)}, {folder}"]
    if manifest.dtype != dtype:
        lines.append(f"its weights and moments are {manifest.dtype}, and {dtype} from now on")
    without_effect = {"initial_loss_scale"} if manifest.loss_scale is not None else set()
    others = [changed(name, manifest.settings.get(name), value) for name, value in settings.items()
              if manifest.settings.get(name) != value and name not in without_effect]
    if others:
        lines.append(f"note: other settings than before, so the run is not the same: {', '.join(others)}")
    return "\n".join(lines)


def changed(name: str, before, now) -> str:
    """'--seed 2 (was 1)', '--bf16 (was not given)'; flags are True or False, and None is an option without a value."""
    text = option(name) if now is True else f"no {option(name)}" if now in (None, False) else f"{option(name)} {now}"
    was = "given" if before is True else "not given" if before in (None, False) else before
    return f"{text} (was {was})"
