"""Saving and resuming of a run, on any number of ranks.

A rank saves its own optimizer states as boxes of whole tensors (reference/parallel/boxes.py), whatever the topology. A
rank that loads finds the stored boxes that overlap its own, and reads just those parts: no rank holds more of the model
than in training, but for its part of one tensor at a time. If several ranks hold the same (the replicas' copies without
ZeRO, replicated tensors, a tied embedding table), one saves it, and all load it.

The order of the data, dropout and the learning rate are functions of the seed and of two counters: those are saved.
"""
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np

from mpi_impl.checkpoints import on_disk
from mpi_impl.checkpoints.manifest import FORMAT, FileSeal, Manifest, StoredTensor, file_of, key_of, text_of
from mpi_impl.comm.group import Group
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.runtime.arrays import moved_to
from mpi_impl.runtime.tables import bytes_of
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, option
from reference.errors import UserError
from reference.models.model import model_tensors
from reference.parallel.boxes import Box, boxes_of_piece, shape_of, without_padding
from reference.parallel.layout import Piece
from reference.params import leaves
from reference.precision import rounded

# The fields of a ModelConfig about training, initial weights and storage. The rest is the model.
NOT_THE_MODEL = {"hidden_dropout", "attention_dropout", "fp16_lm_cross_entropy", "init_method_std",
                 "make_vocab_size_divisible_by", "predicted_share", "moe_aux_loss_coeff", "moe_z_loss_coeff",
                 "moe_expert_capacity_factor"}

# Names of fields that are not options.
WORDS = {"vocab_size": "--vocab-size (which the tokenizer decides)", "architecture": "The architecture",
         "heads": "The list of heads"}

TOKENIZER = "the tokenizer"      # its fingerprint's name among the settings
OF_THAT_RUN = ("Give the --vocab-size, the --tokenizer-type, and the --data-path that it was trained on or its "
               "--vocab-file and --merge-file, of the run that was saved.")


def model_of(model: ModelConfig) -> dict[str, Any]:
    """Convert a configuration to JSON types, which have no tuples."""
    found: dict[str, Any] = {name: list(value) if isinstance(value, tuple) else value
                             for name, value in asdict(model).items() if name not in NOT_THE_MODEL}
    if model.experts:
        found["experts"] = {name: value for name, value in found["experts"].items() if name not in NOT_THE_MODEL}
    return found


def by_option(model: dict[str, Any]) -> dict[str, Any]:
    """Return what model_of returns, with the options of experts among the others."""
    return {"num_experts": None, **model, **(model.get("experts") or {}), "experts": None}


# ---- save -----------------------------------------------------------------------------------------------------------


def save(trainer: Trainer, root: str, settings: dict[str, Any]) -> str:
    """Save a checkpoint, called by all ranks between two steps; return a line about it.

    Raises UserError, on every rank, if it fails. The last good checkpoint is then still there, and still the last.
    """
    began, world = time.perf_counter(), trainer.topology.world
    aside = world.broadcast_object(lambda: on_disk.make_aside(root, trainer.iteration), "a folder for the checkpoint")
    try:
        saved = world.collect_on_first(lambda: save_shards(trainer, aside), "the checkpoint's shards")
        manifest = world.broadcast_object(lambda: write_manifest(trainer, root, aside, settings, saved),
                                          "the checkpoint's manifest")
    except UserError:
        world.broadcast_object(lambda: on_disk.discard(aside), "the removal of a checkpoint that cannot be saved")
        raise
    return (f"saved iteration {trainer.iteration}: {bytes_of(manifest.size)} in "
            f"{time.perf_counter() - began:.1f} s, {on_disk.folder_of(root, trainer.iteration)}")


def save_shards(trainer: Trainer, aside: str) -> tuple[list[tuple[str, Box]], dict[str, FileSeal]]:
    """Write a file for each state of this rank, by a thread each; return the names and boxes of its tensors, and the
    files.
    """
    rank, states = trainer.topology.world.rank, trainer.state.optimizer_states
    saved = {state: boxes_to_save(trainer, state) for state in states}

    def write(state: str) -> tuple[str, FileSeal]:
        pieces, boxes = saved[state]
        name, shapes = file_of(state, rank), {key_of(tensor, box): shape_of(box) for tensor, box in boxes}
        elements = (finite(trainer, state, *elements) for elements in states[state].on_host(pieces))
        return name, on_disk.write_tensors(os.path.join(aside, name), trainer.state.precision.main, shapes, elements)

    with ThreadPoolExecutor() as threads:
        return saved["parameters"][1], dict(threads.map(write, [state for state in states if saved[state][1]]))


def boxes_to_save(trainer: Trainer, state: str) -> tuple[list[Piece], list[tuple[str, Box]]]:
    """Return what this rank saves of a state: the pieces of its buffer, and the boxes of tensors that they are."""
    tensor, saved = trainer.topology.place.tensor, trainer.state.saved
    pieces = without_padding(trainer.state.pieces_in(trainer.state.optimizer_states[state], saved), tensor)
    return pieces, [(piece.of.name, box) for piece in pieces
                    for box in boxes_of_piece(piece, tensor, trainer.topology.expert_rank)]


def finite(trainer: Trainer, state: str, piece: Piece, values: np.ndarray) -> np.ndarray:
    """Return elements of a piece. Raise UserError if they are not finite in the state's format."""
    form, weights = trainer.state.precision.form, state == "parameters"
    if not np.isfinite(rounded(values, form) if weights else values).all():
        whose = "Muon's" if piece.of.matrix else "Adam's"
        what = f"{piece.of.name} infinite in {form.name}" if weights else f"{whose} {state} of {piece.of.name} infinite"
        raise UserError(f"Iteration {trainer.iteration} produced Inf or NaN in {what} on rank "
                        f"{trainer.topology.world.rank}: the run has diverged, and no checkpoint of it is saved. Try a "
                        "smaller --lr, or a longer warm-up (--lr-warmup-iters).")
    return values


def write_manifest(trainer: Trainer, root: str, aside: str, settings: dict[str, Any], saved: list) -> Manifest:
    """Write the manifest, on rank 0, from the results of save_shards on all ranks."""
    tensors = {name: StoredTensor(tensor.shape, {}) for name, tensor in leaves(model_tensors(trainer.state.model))}
    files: dict[str, FileSeal] = {}
    for rank, (boxes, its_files) in enumerate(saved):
        files |= its_files
        for name, box in boxes:
            tensors[name].ranks_of_boxes[text_of(box)] = rank
    follows = trainer.scaler.scaling.loss_scale is None
    manifest = Manifest(FORMAT, trainer.iteration, trainer.optimizer.iteration,
                        trainer.scaler.state if follows else None, trainer.state.precision.main,
                        model_of(trainer.state.model), settings, tensors, files, trainer.optimizer.config.optimizer)
    on_disk.publish(root, aside, manifest)
    return manifest


# ---- load -----------------------------------------------------------------------------------------------------------


def load(trainer: Trainer, root: str, manifest: Manifest) -> None:
    """Load a checkpoint, called by all ranks before the first step. Raise UserError, on every rank, for a bad file."""
    check_model(root, manifest, trainer.state.model)
    check_optimizer(root, manifest, trainer.optimizer.config.optimizer)
    load_states(trainer, root, manifest, list(trainer.state.optimizer_states))
    trainer.iteration, trainer.optimizer.iteration = manifest.iteration, manifest.updates
    if manifest.loss_scale is not None and trainer.scaler.scaling.loss_scale is None:
        trainer.scaler.state = manifest.loss_scale
    trainer.state.adopt_master_weights()


def load_weights(trainer: Trainer, root: str, manifest: Manifest) -> list[str]:
    """Load only the parameters, for a model that may have other heads. Called by all ranks before the first step.

    Returns the tensors that the checkpoint lacks, which keep their initial values. Tensors that the model lacks are
    skipped; moments and counters stay 0. Raises UserError, on every rank, as `load` does.
    """
    check_model(root, manifest, trainer.state.model, other_heads=True)
    load_states(trainer, root, manifest, ["parameters"])
    trainer.state.adopt_master_weights()
    return [name for name, _ in leaves(model_tensors(trainer.state.model)) if name not in manifest.tensors]


def check_model(root: str, manifest: Manifest, model: ModelConfig, other_heads: bool = False) -> None:
    """Raise UserError if the checkpoint is another model's; `other_heads` ignores differences in heads."""
    saved_model = by_option(model_of(manifest.config))
    for name, value in by_option(model_of(model)).items():
        saved = saved_model.get(name)
        if saved != value and not (other_heads and name == "heads"):
            raise UserError(f"{WORDS.get(name, option(name))} is {value}, but {saved} in "
                            f"{on_disk.folder_of(root, manifest.iteration)}: that is a checkpoint of another model.")


def check_optimizer(root: str, manifest: Manifest, optimizer: str) -> None:
    """Raise UserError if the checkpoint has the states of another optimizer."""
    if manifest.optimizer != optimizer:
        raise UserError(f"--optimizer is {optimizer}, but {on_disk.folder_of(root, manifest.iteration)} has the states "
                        f"of {manifest.optimizer}, which keeps others. Give --optimizer {manifest.optimizer}.")


def check_tokenizer(root: str, manifest: Manifest, tokenizer: Tokenizer, advice: str = OF_THAT_RUN) -> None:
    """Raise UserError, with advice, if the model was trained with another tokenizer's ids."""
    if manifest.settings.get(TOKENIZER, tokenizer.fingerprint) != tokenizer.fingerprint:
        size, saved = tokenizer.vocab_size, manifest.model["vocab_size"]
        sizes = f" (it has {size:,} tokens, that one {saved:,})" if size != saved else ""
        raise UserError(f"The tokenizer is not that of {on_disk.folder_of(root, manifest.iteration)}"
                        f"{sizes}, so the same ids mean other tokens. {advice}")


def check_iterations(root: str, manifest: Manifest, train_iters: int) -> None:
    """Raise UserError if nothing is left to do."""
    if manifest.iteration >= train_iters:
        raise UserError(f"--train-iters is {train_iters}, but {on_disk.folder_of(root, manifest.iteration)}, which is "
                        f"to be loaded, has {manifest.iteration} behind it: nothing is left to do. Choose more.")


def check_files(world: Group, root: str, manifest: Manifest, state: str) -> None:
    """Check the files of a state, each on one of the ranks. Raise UserError, on every rank, for a damaged one."""
    reader = on_disk.StateReader(root, state, manifest, files_to_check(world, state, manifest))
    world.collect_objects(reader.check, "the checkpoint's checksums")


def files_to_check(world: Group, state: str, manifest: Manifest) -> list[str]:
    """Return the files of a state that this rank checks: those that it has saved, if the topology is the same."""
    return list(manifest.files_of(state))[world.rank::world.size]


def load_states(trainer: Trainer, root: str, manifest: Manifest, states: list[str]) -> None:
    """Load these states on all ranks. None goes on before all files have been checked."""
    trainer.topology.world.collect_objects(lambda: read_states(trainer, root, manifest, states),
                                           "the content of the checkpoint")


def read_states(trainer: Trainer, root: str, manifest: Manifest, states: list[str]) -> None:
    """Read this rank's elements of the stored tensors, piece by piece, and check its files at the same time. (Padding
    is not stored, and stays 0.)
    """
    for state in states:
        files = files_to_check(trainer.topology.world, state, manifest)
        buffer, reader = trainer.state.optimizer_states[state], on_disk.StateReader(root, state, manifest, files)
        pieces = trainer.state.pieces_in(buffer, trainer.state.pieces)
        for piece in without_padding(pieces, trainer.topology.place.tensor):
            if piece.of.name in manifest.tensors:
                buffer.store(piece, moved_to(load_piece(trainer, reader, piece), trainer.state.main))
        reader.check()


def load_piece(trainer: Trainer, reader: on_disk.StateReader, piece: Piece):
    """Return a piece's elements, [piece.size], in the dtype of the checkpoint."""
    boxes = boxes_of_piece(piece, trainer.topology.place.tensor, trainer.topology.expert_rank)
    parts = [reader.read(piece.of.name, box).reshape(-1) for box in boxes]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def describe(root: str, manifest: Manifest, settings: dict[str, Any], dtype: str) -> str:
    """Describe the loaded checkpoint, and the differences of this run from the one that saved it."""
    folder = on_disk.folder_of(root, manifest.iteration)
    lines = [f"loaded iteration {manifest.iteration}: {bytes_of(manifest.size)}, {folder}"]
    if manifest.dtype != dtype:
        lines.append(f"its weights and moments are {manifest.dtype}, and {dtype} from now on")
    without_effect = {"initial_loss_scale"} if manifest.loss_scale is not None else set()
    others = [describe_change(name, manifest.settings.get(name), value) for name, value in settings.items()
              if manifest.settings.get(name) != value and name not in without_effect]
    if others:
        lines.append(f"note: other settings than before, so the run is not the same: {', '.join(others)}")
    return "\n".join(lines)


def describe_change(name: str, before, now) -> str:
    """Format a changed option: '--seed 2 (was 1)', '--bf16 (was not given)'. Flags are bools; None has no value."""
    text = option(name) if now is True else f"no {option(name)}" if now in (None, False) else f"{option(name)} {now}"
    was = "given" if before is True else "not given" if before in (None, False) else before
    return f"{text} (was {was})"
