"""The layouts of Hugging Face's `transformers`: the place of each tensor of ours in its files, and the names of our
options in its config.json. There is one layout for GPT-2 (gpt2_layout.py), two for BERT (bert_layout.py), one that
Llama, Mistral and Qwen share (llama_layout.py), and one for those of them with experts (mixtral_layout.py).

The numbers are the same, but a matrix may be transposed, and one tensor of ours may be three of theirs, or a part of
one. A view of our array always has the numbers in their order, so that one assignment copies a rank's shard from a
slice of the file, or into a whole tensor.
"""
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from reference.config import ModelConfig
from reference.errors import UserError
from reference.params import Tensor

# Options of a GPT that no layout has, with the value that stands for theirs.
OURS_ALONE: dict[str, Any] = {"share_layers": False, "squared_relu": False}


class TensorPlace(NamedTuple):
    """The place of a tensor of ours, or a part of one, in a file."""

    name: str                      # of the tensor there, without the prefix
    shape: tuple[int, ...]         # of all of that tensor
    axis: int | None               # the axis that tensor parallelism shards; None: replicated
    first: int = 0                 # the start of this part along the axis
    length: int = 0                # and its length
    transposed: bool = False       # whether our matrix [n, m] is [m, n] there
    part: int | None = None        # 0, 1, 2 for q, k, v, which are parts of our w_qkv, or gate and up of our w_in
    heads: bool = False            # whether our last two axes, heads and their columns, are one axis there
    expert: int | None = None      # the number in our stack of experts, of a tensor that is one expert's there

    def shard_and_place(self, shard, number: int) -> tuple[Any, tuple[slice, ...]]:
        """Return a view of this part of our tensor's shard of this number, and its place in the tensor of the file.

        Padding, at the end of the last shards, is not in the file, and so not in the view.
        """
        if self.expert is not None:                                    # [E, ...] -> [...]
            shard = shard[self.expert]
        if self.part is not None:                                      # [h, 3, a/t, d] -> [h, a/t, d]
            shard = shard[..., self.part, :, :] if self.heads else shard[..., self.part, :]
        if self.heads:                                                 # [h, a/t, d] -> [h, a/t d]
            shard = shard.reshape(*shard.shape[:-2], -1)
        if self.transposed:
            shard = shard.T
        if self.axis is None:
            return shard, (slice(None),)
        length, before = shard.shape[self.axis], (slice(None),) * self.axis
        start = min(number * length, self.length)
        stop = min(start + length, self.length)
        return shard[(*before, slice(stop - start))], (*before, slice(self.first + start, self.first + stop))


def own_experts(places: list[TensorPlace], rank: int, count: int) -> list[TensorPlace]:
    """Return the places of the experts that are dealt out to a rank, `count` to each, with their numbers there."""
    return [place._replace(expert=place.expert % count) for place in places
            if place.expert is not None and place.expert // count == rank]


def place(name: str, tensor: Tensor, transposed: bool = False) -> TensorPlace:
    """Return the place of a tensor that is one tensor there, too."""
    shape, axis = tensor.shape, tensor.split
    if transposed:
        shape, axis = shape[::-1], None if axis is None else len(shape) - 1 - axis
    return TensorPlace(name, shape, axis, length=0 if axis is None else shape[axis], transposed=transposed)


def check_type(path: str, name: str, value, kind: type):
    """Return the value in the right type. An integer may stand for a float; a bool is not a number."""
    if kind is float and type(value) is int and abs(value) <= 1 << 53:
        value = float(value)
    if type(value) is not kind:
        expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a name",
                    dict: "an object", list: "a list"}[kind]
        raise UserError(f"{path} says that {name} is {value!r}, but it must be {expected}.")
    return value


class TransformersLayout(NamedTuple):
    """The layout of one kind of model in transformers."""

    model_type: str                                  # in its config.json
    architecture: str                                # ModelConfig's
    classes: dict[tuple[str, ...], str]              # transformers' class, by the model's heads
    # config.json: its names for our options,
    same: dict[str, str]                             # its field for an option that says the same
    activation: str | None                           # and for nearly the same: the MLP's activation, if it varies,
    hidden_dropout: tuple[str, ...]                  # several fields that are one option here,
    attention_dropout: str
    mlp_width: tuple[str, int | None] | None         # that of the MLP's width, and its default, if it must be 4 h
    fields: dict[str, Any]                           # all these with transformers' defaults, and of their types
    fixed: dict[str, tuple[Any, str]]                # fields with the only value allowed, and their meaning
    options: dict[str, Any]                          # ours, which follow from the model_type
    # model.safetensors: its tensors.
    places: Callable[[str, Tensor, int], list[TensorPlace]]    # of our tensor, by its name, in a model of L layers
    prefix: str                                      # of the names of all tensors, or of none,
    heads: tuple[str, ...]                           # except those that begin like this
    twins: dict[str, str]                            # tied copies that files may have: equal to these
    buffers: re.Pattern                              # older versions' tensors that are no parameters
    # config.json again: further names of fields, which count more than the usual ones, as in transformers,
    aliases: dict[str, str] = {}                                        # such a name -> that in `fields`,
    # and options that are not there in their own form,
    derived: dict[str, str] = {}                                        # each with the field that says it,
    derive: Callable[[str, dict, dict], dict[str, Any]] = lambda *file: {}  # of a file: its path, content and `fields`,
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}       # and the fields for a model
    suits: Callable[[ModelConfig], bool] = lambda model: True           # whether its class admits the model's sizes

    def full_name(self, name: str) -> str:
        """Add the prefix to a name."""
        return name if name.startswith(self.heads) else self.prefix + name
