"""The manifest of a checkpoint: a list of all tensors, their boxes, and the ranks and files that hold them.

Nothing of a manifest is trusted before it has been checked: its tensors are exactly the model's, the boxes of each tile
it, and every file with boxes is listed with its size and checksum. So a manifest that someone has changed cannot leave
weights at their initial values, or point to another's files.
"""
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import prod
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from reference.config import ModelConfig
from reference.models.model import model_tensors
from reference.optimizers.muon import is_matrix
from reference.parallel.boxes import Box, shape_of
from reference.params import leaves
from reference.precision import ScaleState

FORMAT: Final = 2
TYPES = {"float32": "F32", "float64": "F64"}     # as safetensors calls them
STATES = ("parameters", "m", "v")                # of the optimizer
MOST_BOXES = 1 << 17                             # of a tensor; each of 16,384 ranks may have five

Count = Annotated[int, Meta(ge=0, le=1 << 53)]


@dataclass(frozen=True)
class FileSeal:
    """The size and the checksum of a file when it was written.

    A checksum is there to find damage, so it need not resist a forger, who could as well write a manifest of their own.
    """

    bytes: Count
    xxh128: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]     # as the program xxh128sum writes it


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, and the place of its elements: each in one box, in the files of one rank."""

    shape: Annotated[tuple[Count, ...], Meta(min_length=1)]
    ranks_of_boxes: Annotated[dict[str, Count], Meta(max_length=MOST_BOXES)]       # boxes as text: '0:3,4:8'

    @cached_property
    def boxes(self) -> list[tuple[Box, int]]:
        """Return the boxes, each with its rank. Raise ValueError for a text that is not a box."""
        return [(box_of(text), rank) for text, rank in self.ranks_of_boxes.items()]


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint."""

    format: Literal[2]
    iteration: Count                       # steps done
    updates: Count                         # of the weights: fewer, if steps were skipped
    loss_scale: ScaleState | None          # None unless the scale follows the gradients
    dtype: Annotated[str, Meta(pattern="^float(32|64)$")]      # of all states
    model: dict[str, Any]                  # the ModelConfig, without training's fields
    settings: dict[str, Any]               # of the run, by the options' names
    tensors: dict[str, StoredTensor]
    files: dict[str, FileSeal]
    optimizer: Annotated[str, Meta(pattern="^(adam|muon)$")] = "adam"

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def files_of(self, state: str) -> dict[str, FileSeal]:
        """Return the files of a state."""
        return {name: file for name, file in self.files.items() if name.rsplit("-", 1)[0] == state}

    @property
    def config(self) -> ModelConfig:
        """Return the model. Raise ValueError for a field that is missing, unknown, or of another type."""
        if unknown := self.model.keys() - {field.name for field in fields(ModelConfig)}:
            raise ValueError(f"a model has no {min(unknown)}")
        return msgspec.convert(self.model, ModelConfig)

    def text(self) -> str:
        """Return it as JSON that a person can read."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_text(cls, text: bytes) -> "Manifest":
        """Parse and check a manifest. Raise ValueError or RecursionError for anything else."""
        manifest = msgspec.json.decode(text, type=cls)
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ValueError unless these are the model's tensors, each in boxes that tile it, in listed files."""
        if self.loss_scale and not self.loss_scale.scale > 0:
            raise ValueError(f"the loss scale is {self.loss_scale.scale}")
        model = self.config
        if model.num_layers > len(self.tensors) and not model.share_layers:     # before that many are declared
            raise ValueError(f"a model of {model.num_layers:,} layers has more than {len(self.tensors):,} tensors")
        declared = dict(leaves(model_tensors(model)))
        expected = {name: tensor.shape for name, tensor in declared.items()}
        found = {name: tensor.shape for name, tensor in self.tensors.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise ValueError(f"the tensor {name} is {found.get(name, 'missing')}, and "
                                 f"{expected.get(name, 'not there')} in the model that it describes")
        for name, tensor in self.tensors.items():
            check_tiling(name, tensor.shape, [box for box, _ in tensor.boxes])
        files = {file_of(state, rank) for name, tensor in self.tensors.items() for _, rank in tensor.boxes
                 for state in STATES if state != "v" or self.optimizer == "adam" or not is_matrix(declared[name])}
        if files != self.files.keys():
            raise ValueError(f"the file {min(files ^ self.files.keys())} is in its boxes or in its list of files, but "
                             "not in both")


def check_tiling(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise ValueError unless every element of an array is in exactly one of the boxes."""
    if any(len(box) != len(shape) for box in boxes):
        raise ValueError(f"a box of {name} {shape} has another number of axes")
    first, last = (np.array([[getattr(along, end) for along in box] for box in boxes], dtype=np.int64)
                   .reshape(len(boxes), len(shape)) for end in ("start", "stop"))       # [boxes, axes]
    if (first < 0).any() or (first >= last).any() or (last > shape).any():
        raise ValueError(f"a box of {name} {shape} is empty or reaches beyond it")
    order = np.argsort(first[:, 0], kind="stable")
    first, last = first[order], last[order]
    for i in range(len(boxes)):         # boxes that begin, along the first axis, before this one ends
        rivals = slice(i + 1, np.searchsorted(first[:, 0], last[i, 0]))
        if ((first[rivals] < last[i]) & (first[i] < last[rivals])).all(1).any():
            raise ValueError(f"boxes of {name} overlap")
    if sum(prod(shape_of(box)) for box in boxes) != prod(shape):
        raise ValueError(f"the boxes of {name} {shape} leave elements out")


def text_of(box: Box) -> str:
    """Format a box like an index: '0:3,4:8'."""
    return ",".join(f"{along.start}:{along.stop}" for along in box)


def box_of(text: str) -> Box:
    """Parse the output of text_of. Raise ValueError for another text."""
    if not re.fullmatch(r"\d{1,15}:\d{1,15}(,\d{1,15}:\d{1,15})*", text, re.ASCII):
        raise ValueError(f"{text[:40]!r} is not a box")
    return tuple(slice(*map(int, along.split(":"))) for along in text.split(","))


def key_of(tensor: str, box: Box) -> str:
    """Return the name of a box in a file."""
    return f"{tensor}[{text_of(box)}]"


def file_of(state: str, rank: int) -> str:
    return f"{state}-{rank:05}.safetensors"
