"""How Hugging Face's `transformers` lays a model out: where each tensor of ours lies in its files, and what its
config.json calls our options. There is one layout for GPT-2 (gpt2_layout.py), and two for BERT (bert_layout.py).

The numbers are the same, but a matrix may stand the other way round, and one tensor of ours be three of theirs, or a
part of one. In every case a view of our array has the numbers in their order, so that one assignment brings a rank's
share in, or out: of the whole tensor, or of a slice of the file.
"""
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from reference.params import Tensor


class Place(NamedTuple):
    """Where a tensor of ours, or a part of one, lies in a file."""

    name: str                      # of the tensor there, without the prefix
    shape: tuple[int, ...]         # of all of that tensor
    view: Callable[[Any], Any]     # our tensor, or a rank's shard of it -> a view of this part, turned as it is there
    axis: int | None               # which axis of that tensor parallelism cuts; None: every rank has all of it
    first: int = 0                 # where this part begins along the axis
    length: int = 0                # and how long it is

    def share(self, shard, rank: int) -> tuple[Any, tuple[slice, ...]]:
        """Rank `rank`'s shard -> a view of what it has of this part, and where that lies in the tensor of the file.

        Padding, at the end of the last shards, is not in the file, and so not in the view.
        """
        part = self.view(shard)
        if self.axis is None:
            return part, (slice(None),)
        share, before = part.shape[self.axis], (slice(None),) * self.axis
        start = min(rank * share, self.length)
        stop = min(start + share, self.length)
        return part[(*before, slice(stop - start))], (*before, slice(self.first + start, self.first + stop))


def as_it_is(x):
    return x


def turned(x):
    return x.T


def place(name: str, tensor: Tensor, turn: bool = False) -> Place:
    """Of a tensor that is one there, too; a matrix [n, m] with `turn` as [m, n]."""
    shape, axis = tensor.shape, tensor.split
    if turn:
        shape, axis = shape[::-1], None if axis is None else len(shape) - 1 - axis
    return Place(name, shape, turned if turn else as_it_is, axis, length=0 if axis is None else shape[axis])


def query_key_or_value(i: int, turn: bool) -> Callable[[Any], Any]:
    """A view of one of the three in attention's w_qkv [h, 3, a, d] or b_qkv [3, a, d]: as [h, a d] or [a d]."""
    def view(x):
        part = x[..., i, :, :]
        part = part.reshape(*part.shape[:-2], -1)
        return part.T if turn else part
    return view


class Layout(NamedTuple):
    """How transformers has one kind of model."""

    model_type: str                                  # in its config.json
    architecture: str                                # ModelConfig's
    classes: dict[tuple[str, ...], str]              # transformers' class, by the model's heads
    # config.json: what it calls our options,
    same: dict[str, str]                             # its field for an option that says the same
    activation: str                                  # and those that say nearly the same: the MLP's activation,
    hidden_dropout: tuple[str, ...]                  # all that are one here,
    attention_dropout: str
    mlp_width: tuple[str, int | None]                # that of the MLP's width, which is 4 h here, and its default
    fields: dict[str, Any]                           # all these with transformers' defaults, and of their types
    fixed: dict[str, tuple[Any, str]]                # fields with the one value that they may have, and what they say
    options: dict[str, Any]                          # of ours, which the model_type alone decides
    # model.safetensors: its tensors.
    places: Callable[[str, Tensor, int], list[Place]]     # of a tensor of ours, by its name, in a model of L layers
    prefix: str                                      # of the names of all tensors, or of none,
    heads: tuple[str, ...]                           # but for those that begin so
    twins: dict[str, str]                            # tied tensors that may be written, too: equal to these
    buffers: re.Pattern                              # what older versions have written of what is no parameter

    def full_name(self, name: str) -> str:
        """With the prefix."""
        return name if name.startswith(self.heads) else self.prefix + name
