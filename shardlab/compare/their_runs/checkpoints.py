"""Checkpoints of other programs: two of one training are compared tensor by tensor, whatever divides them.

torch.distributed.checkpoint (DCP) writes a folder. Its .metadata is a pickle that lists the chunks of each tensor, with
their offsets in the whole, and where each of them is: a complete file of torch.save, inside of __RANK_N.distcp
(torch/distributed/checkpoint/metadata.py and filesystem.py). A file of torch.save, and safetensors in one file or in
several with an index, hold whole tensors. The names in a nested dict are joined with dots, as DCP does it.
"""
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np

from mpi_impl.checkpoints.huggingface import INDEX, WEIGHTS, WeightIndex
from mpi_impl.runtime.files import LARGEST, is_there, path_inside
from mpi_impl.runtime.formats import read_json
from mpi_impl.runtime.pickles import DAMAGED, read_pickle
from mpi_impl.runtime.torch_files import DTYPES, Dtype, SavedTensor, opened_saved, require_count
from reference.errors import UserError
from reference.precision import FORMATS
from shardlab.compare.completeness import covers
from shardlab.compare.differences import TOLERANCE, Scale, magnitude
from shardlab.compare.recording import TensorPart
from shardlab.compare.report import agreement, first, table
from shardlab.compare.their_runs.differences import NEGLIGIBLE, ROUNDING, Comparison, coarsest
from shardlab.compare.their_runs.layouts import in_one_layout
from shardlab.compare.their_runs.records import ReadValues, TheirKey, TheirRun, arrays_in, format_of, read_array

METADATA = ".metadata"
TORCH = (".pt", ".pth", ".bin")                 # how files of torch.save are called
CHUNKS = re.compile(r".*__(\d{1,9})_\d+\.distcp")
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")      # an optimizer's means of gradients
STATE = re.compile(r"(?:.*\.)?state\.(.+)\.exp_avg")
# What wrappers put into names.
WRAPPED = re.compile(r"\b(module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
NUMBER = re.compile(r"(?<![^.])(\d{1,9})(?![^.])")
MOST, DEEPEST = 1 << 20, 32                     # containers in a file of torch.save, and in one another

Parts = list[tuple[TensorPart, ReadValues]]


class CheckpointKey(TheirKey):
    """A tensor of a checkpoint, where there are neither steps nor phases."""

    def __str__(self) -> str:
        return self.name


def is_checkpoint(path: str) -> bool:
    if os.path.isdir(path):
        return any(os.path.isfile(os.path.join(path, name)) for name in (METADATA, WEIGHTS, INDEX))
    return path.endswith((*TORCH, ".safetensors")) and os.path.isfile(path)


def compared(a: str, b: str) -> tuple[str, bool]:
    """Compare two checkpoints: what is to be said, and whether they differ. Raises UserError."""
    runs = read(a), read(b)
    pair = in_one_layout(*runs)
    # The ranks of one framework's parts are named; GPT-2's matrices are turned, or not.
    translated = pair and (pair.a.framework != pair.b.framework or pair.a.framework == "transformers' GPT-2"
                           or not runs[0].parts.keys() & runs[1].parts.keys())
    if pair and translated:
        pair.find_heads()
        runs = pair.a, pair.b
    comparison = CheckpointComparison(*runs)
    try:
        found = comparison.findings()
    except UserError:       # another shape
        if pair and (why := pair.explanation()):
            return f"A and B differ. {why}", True
        raise
    if found.differences:
        why = pair.explanation() if pair else ""
        return "\n".join([*first(found, order="the order of the names"), "", *table(found.differences),
                          *(["", why] if why else [])]), True
    alone = f"; {found.alone:,} more are in one alone" if found.alone else ""
    formats = ", ".join(sorted({*comparison.a.formats.values(), *comparison.b.formats.values()}))
    said = agreement(found, "the checkpoints", f"{formats}{alone}")
    return f"{said} {pair}" if translated else said, False


def read(path: str) -> TheirRun:
    """Read a checkpoint, but not yet the values of its tensors. Raises UserError."""
    if os.path.isfile(path):
        tensors = saved_tensors(path) if path.endswith(TORCH) else safetensors([path])
    elif os.path.isfile(os.path.join(path, METADATA)):
        tensors = distributed_tensors(path)
    else:
        tensors = safetensors(weight_files(path))
    run = TheirRun(path, [], {}, {})
    for name, parts, dtype in tensors:
        key = CheckpointKey(0, "checkpoint", WRAPPED.sub("", name), 0)
        if key in run.parts:
            raise UserError(f"{path} has the tensor {name} twice: files of two checkpoints are mixed, or each has a "
                            "part of it. Consolidate them.")
        if parts:       # not one without elements
            run.parts[key], run.formats[key] = parts, dtype
    if not run.parts:
        raise UserError(f"{path} holds no tensor: give another checkpoint.")
    run.order = [CheckpointKey(0, "checkpoint", name, 0) for name in in_natural_order(key.name for key in run.parts)]
    return run


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Sort names by the numbers in them, layer 2 before layer 10, and else as they are stored."""
    stored: dict[str, int] = {}

    def place(name: str) -> list[int]:
        found, so_far = [], ""
        for i, piece in enumerate(NUMBER.split(name)):
            so_far += "#" if i % 2 else piece
            found.append(int(piece) if i % 2 else stored.setdefault(so_far, len(stored)))
        return found

    return sorted(names, key=place)


def whole(shape: tuple[int, ...], read_values: ReadValues) -> Parts:
    return [(TensorPart(0, (0,) * len(shape), shape, False), read_values)] if prod(shape) else []


# ---- the comparison -------------------------------------------------------------------------------------------------


class CheckpointComparison(Comparison):
    """Two checkpoints, of which each tensor is compared in its own format.

    A bias whose gradients are rounding alone, that of keys, is left out: Adam moves it by whole steps, in whichever
    direction rounding points. Not so a row of an embedding whose token has not come for long.
    """

    def scale(self, key: TheirKey, whole: Any) -> Scale:
        form = coarsest(self.a.format_of(key), self.b.format_of(key))
        least = NEGLIGIBLE * self.largest_moments.get(key.name.rpartition(".")[2], 0)
        return Scale(max(magnitude(whole), least), "the largest element", TOLERANCE[form].first)

    def is_no_rounding(self, key: TheirKey, shape: tuple[int, ...]) -> Any:
        names = key.name.split(".")
        moment = next((self.first_moments[name] for i in range(len(names))
                       if (name := ".".join(names[i:])) in self.first_moments), None)
        if moment is None or len(shape) != 1:
            return np.ones(shape, bool)
        mean = abs(self.whole(moment))
        least = ROUNDING * FORMATS[self.a.format_of(moment)].epsilon * self.largest_moments["exp_avg"]
        return (mean == 0) | (mean > least) if mean.shape == shape else np.ones(shape, bool)

    @cached_property
    def first_moments(self) -> dict[str, TheirKey]:
        """Return Adam's mean of the gradient of each weight in A, by the weight's name. Where states have numbers, as
        in a file of torch.save, the n-th is of the n-th weight, if there are as many.
        """
        found = {match[1]: key for key in self.a.parts if (match := STATE.fullmatch(key.name))}
        if not all(name.isdecimal() for name in found):
            return found
        weights = [key.name for key in self.a.parts if key.name.rpartition(".")[2] in ("weight", "bias")]
        return {weights[int(name)]: key for name, key in found.items()} if len(found) == len(weights) else {}

    @cached_property
    def largest_moments(self) -> dict[str, float]:
        """Return the largest element of each of the optimizer's moments in A."""
        largest: dict[str, float] = {}
        for key in self.a.parts:
            if (moment := key.name.rpartition(".")[2]) in MOMENTS:
                largest[moment] = max(largest.get(moment, 0), magnitude(self.whole(key)))
        return largest


# ---- whole tensors --------------------------------------------------------------------------------------------------


def saved_tensors(path: str) -> Iterator[tuple[str, Parts, str]]:
    """Yield the tensors of a file of torch.save: the name, its one part, and the format."""
    with opened_saved(path) as saved:
        for name, tensor in named_tensors(path, saved.content).items():
            saved.check(tensor)
            yield name, whole(tensor.shape, partial(read_saved, path, name)), format_of(np.dtype(tensor.dtype))


def named_tensors(path: str, content: Any) -> dict[str, SavedTensor]:
    """Return all tensors in nested dicts and lists. Raises UserError for too many of those."""
    found, left, seen = {}, [("", content, 0)], 0
    while left:
        name, value, depth = left.pop()
        if isinstance(value, SavedTensor):
            found[name or "tensor"] = value
            continue
        seen += 1
        if depth > DEEPEST or seen > MOST:
            raise UserError(f"{path} has too many dicts and lists, in one another: save a dict of tensors.")
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        left += reversed([(f"{name}.{key}" if name else str(key), one, depth + 1) for key, one in items
                          if isinstance(one, (SavedTensor, dict, list))])
    return found


def read_saved(path: str, name: str) -> Any:
    with opened_saved(path) as saved:
        return saved.load(named_tensors(path, saved.content)[name])


def weight_files(folder: str) -> list[str]:
    """Return the files of safetensors in a folder: a single one, or those that the index names. Raises UserError."""
    one, index = (os.path.join(folder, name) for name in (WEIGHTS, INDEX))
    if os.path.isfile(one):
        return [one]
    return [path_inside(folder, name, index)
            for name in sorted(set(read_json(index, WeightIndex, LARGEST).weight_map.values()))]


def safetensors(paths: list[str]) -> Iterator[tuple[str, Parts, str]]:
    """Yield the tensors of these files: the name, its one part, and the format."""
    for path in paths:
        for name, array in arrays_in(path).items():
            yield name, whole(array.shape, partial(read_array, path, name)), array.format


# ---- torch.distributed.checkpoint -----------------------------------------------------------------------------------


class Noted:
    """An object of torch's, of which only the state is kept."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class NotedTensor(Noted):
    """A tensor's entry, TensorStorageMetadata in PyTorch. All other objects of a checkpoint are not tensors."""


def ignore(*_: Any) -> None:
    """Stand for what a checkpoint says of memory and paths."""


OF_METADATA: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): tuple, ("builtins", "set"): set,
    **{("torch", name): Dtype(dtype) for name, dtype in DTYPES.items()},
    **{("torch.distributed.checkpoint.metadata", name): Noted for name in (
        "Metadata", "MetadataIndex", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "StorageMeta")},
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): NotedTensor,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Noted,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): Noted,       # before PyTorch 2.3
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): ignore,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): ignore,
    ("torch.serialization", "_get_layout"): ignore,
    **{(module, name): ignore for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}}


def distributed_tensors(folder: str) -> Iterator[tuple[str, Parts, str]]:
    """Yield the tensors of a folder of DCP: the name, the chunks, and the format. Raises UserError."""
    path = os.path.join(folder, METADATA)
    metadata = read_pickle(path, OF_METADATA)
    try:
        places = {(key.state["fqn"], tuple(key.state.get("offset") or ())): info.state
                  for key, info in metadata.state["storage_data"].items()}
        for name, about in metadata.state["state_dict_metadata"].items():
            if isinstance(about, NotedTensor):
                dtype, size = np.dtype(about.state["properties"].state[0].of), counts(about.state["size"])
                parts = [chunk_of(folder, name, dtype, chunk.state, places) for chunk in about.state["chunks"]]
                check_tiled(path, name, size, [part for part, _ in parts])
                yield name, [one for one in parts if prod(one[0].shape)], format_of(dtype)
    except UserError:
        raise
    except DAMAGED as error:
        raise UserError(f"{path} is not what torch.distributed.checkpoint writes, or it is damaged: "
                        f"{type(error).__name__}, {error}.") from error


def counts(numbers: Any) -> tuple[int, ...]:
    return tuple(map(require_count, numbers))


def chunk_of(folder: str, name: str, dtype: np.dtype, chunk: dict[str, Any],
             places: dict[tuple, dict[str, Any]]) -> tuple[TensorPart, ReadValues]:
    """Return a chunk's place in its tensor, and what reads its values. Raises UserError if its file lacks it."""
    offsets, shape = counts(chunk["offsets"]), counts(chunk["sizes"])
    place = places[name, offsets]
    path = path_inside(folder, place["relative_path"], os.path.join(folder, METADATA))
    start, length = span = require_count(place["offset"]), require_count(place["length"])
    if not is_there(path):
        raise UserError(f"{path} is missing, which has a part of {name}: copy the files of all ranks into one folder.")
    if place.get("transform_descriptors"):
        raise UserError(f"{path} has been transformed ({', '.join(map(str, place['transform_descriptors']))}), which "
                        "is not undone here: save the checkpoint without.")
    if start + length > os.path.getsize(path) or prod(shape) * dtype.itemsize > length:
        raise UserError(f"{path} is too short for its part of {name}, {list(shape)}: it was not written to its end, "
                        "or is of another checkpoint.")
    found = CHUNKS.fullmatch(os.path.basename(path))
    return (TensorPart(int(found[1]) if found else 0, offsets, shape, False),
            partial(read_chunk, path, name, span, shape))


def check_tiled(path: str, name: str, size: tuple[int, ...], parts: list[TensorPart]) -> None:
    """Raise UserError unless each element of a tensor is in one chunk."""
    if sum(prod(part.shape) for part in parts) != prod(size) or not covers(parts, size):
        raise UserError(f"{path} lists chunks of {name} that do not make the whole, {list(size)}, each element once: "
                        "it is damaged, or files of two checkpoints are mixed.")


def read_chunk(path: str, name: str, span: tuple[int, int], shape: tuple[int, ...]) -> Any:
    with opened_saved(path, span) as saved:
        if not isinstance(saved.content, SavedTensor) or saved.content.shape != shape:
            raise UserError(f"{path} has something else where {METADATA} says that a part of {name}, {list(shape)}, "
                            "is: it is of another checkpoint.")
        return saved.load(saved.content)
