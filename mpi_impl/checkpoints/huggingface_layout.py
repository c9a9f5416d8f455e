"""The layouts of Hugging Face's `transformers`: the place of each tensor of ours in its files, and the names of our
options in its config.json. There is one layout for GPT-2 (gpt2_layout.py), and two for BERT (bert_layout.py).

The numbers are the same, but a matrix may be transposed, and one tensor of ours may be three of theirs, or a part of
one. In every case a view of our array has the numbers in their order, so that one assignment copies a rank's shard in
or out: of the whole tensor, or of a slice of the file.
"""
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from reference.params import Tensor


class TensorPlace(NamedTuple):
    """The place of a tensor of ours, or a part of one, in a file."""

    name: str                      # of the tensor there, without the prefix
    shape: tuple[int, ...]         # of all of that tensor
    view: Callable[[Any], Any]     # our tensor, or a rank's shard of it -> a view of this part, transposed as there
    axis: int | None               # the axis that tensor parallelism shards; None: replicated
    first: int = 0                 # the start of this part along the axis
    length: int = 0                # and its length

    def share(self, shard, rank: int) -> tuple[Any, tuple[slice, ...]]:
        """Return a view of rank `rank`'s shard of this part, and its place in the tensor of the file.

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


def place(name: str, tensor: Tensor, turn: bool = False) -> TensorPlace:
    """Make the place of a tensor that is one there, too; with `turn` a matrix [n, m] is stored as [m, n]."""
    shape, axis = tensor.shape, tensor.split
    if turn:
        shape, axis = shape[::-1], None if axis is None else len(shape) - 1 - axis
    return TensorPlace(name, shape, turned if turn else as_it_is, axis, length=0 if axis is None else shape[axis])


def query_key_or_value(i: int, turn: bool) -> Callable[[Any], Any]:
    """Return a function that views q, k or v of w_qkv [h, 3, a, d] as [h, a d], or of b_qkv [3, a, d] as [a d]."""
    def view(x):
        part = x[..., i, :, :]
        part = part.reshape(*part.shape[:-2], -1)
        return part.T if turn else part
    return view


class TransformersLayout(NamedTuple):
    """The layout of one kind of model in transformers."""

    model_type: str                                  # in its config.json
    architecture: str                                # ModelConfig's
    classes: dict[tuple[str, ...], str]              # transformers' class, by the model's heads
    # config.json: its names for our options,
    same: dict[str, str]                             # its field for an option that says the same
    activation: str                                  # and for nearly the same: the MLP's activation,
    hidden_dropout: tuple[str, ...]                  # several fields that are one option here,
    attention_dropout: str
    mlp_width: tuple[str, int | None]                # that of the MLP's width, which is 4 h here, and its default
    fields: dict[str, Any]                           # all these with transformers' defaults, and of their types
    fixed: dict[str, tuple[Any, str]]                # fields with the only value allowed, and their meaning
    options: dict[str, Any]                          # ours, which follow from the model_type
    # model.safetensors: its tensors.
    places: Callable[[str, Tensor, int], list[TensorPlace]]    # of our tensor, by its name, in a model of L layers
    prefix: str                                      # of the names of all tensors, or of none,
    heads: tuple[str, ...]                           # except those that begin like this
    twins: dict[str, str]                            # tied copies that files may have: equal to these
    buffers: re.Pattern                              # older versions' tensors that are no parameters

    def full_name(self, name: str) -> str:
        """Add the prefix to a name."""
        return name if name.startswith(self.heads) else self.prefix + name
