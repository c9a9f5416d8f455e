"""A recording of our own, by `pretrain_gpt --record`, as one of a model of transformers, to be compared with one.

The outputs that both have get transformers' names, and so do the weights, in its layout. The output of a branch is
recorded here before its bias is added, so it is compared for models without these biases only.
"""
import os
from typing import Any

import numpy as np

from mpi_impl.checkpoints.huggingface_config import layout_of
from reference.errors import UserError
from shardlab.compare import recording
from shardlab.compare.names import Key
from shardlab.compare.recording import Recording, whole_shape
from shardlab.compare.their_runs.records import PHASES
from shardlab.compare.their_runs.replay import Names, Wholes, in_their_layout

OF_WEIGHTS = {"parameters": "parameters", "reduction": "gradients", "optimizer parameters": "optimizer parameters"}
OUTPUTS = ("input_layernorm.output", "post_attention_layernorm.output")
BRANCHES = ("attention.output", "mlp.output")


def is_ours(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, recording.INDEX))


def read_ours(folder: str) -> Wholes:
    """Read a recording of a GPT. Raises UserError for one that transformers does not have."""
    run = recording.read(folder)
    if run.about.model.architecture != "gpt":
        raise UserError(f"{folder} is not of a GPT, but only a GPT can be compared with a "
                        "recording of another program.")
    model, found = run.about.model, Wholes(folder)
    if model.hidden_dropout or model.attention_dropout:
        raise UserError(f"{folder} was recorded with dropout, and no other program drops the same elements. Record it "
                        "with --hidden-dropout 0 --attention-dropout 0.")
    names = Names(layout_of(model), model)
    for key in sorted(run.parts, key=lambda key: key.order):
        if name := their_name(key, names, model):
            found.note(key.iteration, key.phase, name, whole_of(run, key))
    for step in sorted({key.iteration for key in run.parts}):
        for phase, theirs in OF_WEIGHTS.items():
            keys = [(name, Key(step, phase, name)) for name in names.places]
            tensors = list(in_their_layout({name: whole_of(run, key) for name, key in keys}, names))
            for name, x in reversed(tensors) if theirs == "gradients" else tensors:
                found.note(step, theirs, name, x)
    found.order.sort(key=lambda key: (key.iteration, PHASES.index(key.phase)))
    return found


def their_name(key: Key, names: Names, model: Any) -> str:
    """Translate an activation, or return "" for one that transformers has in another form, or not at all."""
    if key.phase == "batch":
        return "input_ids" if key.name == "tokens" else ""
    if key.phase not in ("forward", "backward"):
        return ""
    if key.name in ("logits", "final_layernorm.output"):
        return "lm_head output" if key.name == "logits" else f"{names.module('final_layernorm')} output"
    _, layer, rest = (*key.name.split(".", 2), "", "")[:3]
    if rest == "input" and int(layer) > 0:
        return f"{names.module(f'blocks.{int(layer) - 1}')} output"
    if rest in OUTPUTS or rest in BRANCHES and not model.add_bias_linear:
        return f"{names.module(key.name.removesuffix('.output'))} output"
    return ""


def whole_of(run: Recording, key: Key) -> Any:
    """Put a whole tensor together, in float64. Raises UserError if it is not there."""
    parts = run.parts.get(key)
    if not parts:
        raise UserError(f"The recording has no {key}: it was ended before that.")
    whole = np.zeros(whole_shape(parts))
    for part in parts:
        whole[part.box] = run.load(part) + (whole[part.box] if part.summed else 0)
    return whole
