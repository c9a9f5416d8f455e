"""The recordings of shardlab_recorder.py: for each rank a list of tensors, as JSON lines, and their values."""
import os
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from mpi_impl.runtime.files import check_readable, is_there, read_text
from mpi_impl.runtime.formats import sentence
from mpi_impl.runtime.torch_files import opened_saved
from reference.errors import UserError
from reference.precision import FORMATS
from shardlab.compare.recording import TensorPart
from shardlab.compare.their_runs.dims import Dim, Local, parse, place

LINES = re.compile(r"rank_(\d{5})\.jsonl")
FILE = re.compile(r"[^/\0]*\.safetensors|")
LARGEST_LINES, MOST_RANKS = 1 << 28, 1 << 20
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}     # as safetensors calls them
PHASES = ("batch", "parameters", "forward", "recompute", "backward", "gradients", "optimizer parameters")
REVERSED = ("backward", "gradients")        # from the loss to the first layer

ReadValues = Callable[[], Any]              # reads the values of a part from their file


class TheirKey(NamedTuple):
    """One tensor of a run. `name` is a parameter's, or a module's with 'input' or 'output' behind it."""

    iteration: int
    phase: str
    name: str
    call: int           # which of the module's calls in a step

    @property
    def layer(self) -> int | None:
        found = re.search(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)(?:\.|$)", self.name.partition(" ")[0])
        return int(found[1]) if found else None

    def __str__(self) -> str:
        what = "gradient of " if self.phase in REVERSED else ""
        call = f", call {self.call + 1}" if self.call else ""
        return f"step {self.iteration}, {self.phase}: {what}{self.name}{call}"


@dataclass
class About:
    """The first line of a rank's list."""

    shardlab_recorder: Literal[1]
    rank: int
    ranks: int
    axes: dict[str, tuple[int, int]]


@dataclass
class Line:
    """A tensor, of which the rank has the values under `key`."""

    step: int
    phase: str
    name: str
    call: int
    key: str
    dims: str
    file: str = ""      # where that does not follow from the rank and the step
    inside: str = ""    # the coarsest format in which a module has computed it

    @property
    def tensor(self) -> "TheirKey":
        return TheirKey(self.step, self.phase, self.name, self.call)


@dataclass
class TheirRun:
    """A recording: the parts of each tensor, and the tensors in the order of computation."""

    has_ranks = True        # which have the parts

    folder: str
    order: list[TheirKey]
    parts: dict[TheirKey, list[tuple[TensorPart, ReadValues]]]
    formats: dict[TheirKey, str]
    dims: dict[TheirKey, tuple[str, ...]] = field(default_factory=dict)     # the dimensions' names, where it has such

    @cached_property
    def first_step(self) -> int:
        return min(key.iteration for key in self.parts)

    def format_of(self, key: TheirKey) -> str:
        """Return the format of a tensor: of whole numbers float64, which holds them."""
        return self.formats[key]

    def load(self, read_values: ReadValues) -> Any:
        """Read a part's values, in float64. Raises UserError for complex numbers."""
        values = read_values()
        if np.iscomplexobj(values):
            raise UserError(f"{self.folder} has a tensor of complex numbers, which are not compared: leave it out.")
        return values.astype(np.float64)


def is_recording(folder: str) -> bool:
    return os.path.isdir(folder) and any(map(LINES.fullmatch, os.listdir(folder)))


def read(folder: str) -> TheirRun:
    """Read the recording of all ranks. Raises UserError if it is not whole, or makes no sense."""
    lists = [read_list(os.path.join(folder, name)) for name in sorted(filter(LINES.fullmatch, os.listdir(folder)))]
    check_ranks(folder, [about for about, _ in lists])
    return placed(folder, lists)


def placed(folder: str, lists: list[tuple[About, list[Line]]]) -> TheirRun:
    """Put the ranks' tensors into their places in whole ones. Raises UserError."""
    for about, _ in lists:
        for axis, (number, size) in about.axes.items():
            if not 0 <= number < size <= MOST_RANKS:
                raise UserError(f"{folder} gives rank {about.rank} a place along {axis} that no rank has: there are at "
                                f"most {MOST_RANKS:,}, and they count from 0. Record it again.")
    arrays = {path: arrays_in(path) for path in sorted({path_of(folder, about, line)
                                                        for about, lines in lists for line in lines})}
    run = TheirRun(folder, in_order(lists), {}, {})
    seen: dict[TheirKey, list[tuple[About, Line]]] = defaultdict(list)
    for about, lines in lists:
        for line in lines:
            seen[line.tensor].append((about, line))
    for key, held in seen.items():
        run.parts[key], run.formats[key], run.dims[key] = parts_of(folder, key, held, arrays)
    if not run.parts:
        raise UserError(f"{folder} lists no tensor: the run was ended before its first step did. Record it again.")
    return run


def read_list(path: str) -> tuple[About, list[Line]]:
    """Read a rank's list. Raises UserError."""
    first, *others = read_text(path, LARGEST_LINES).splitlines() or [""]
    try:
        about = msgspec.json.decode(first, type=About)
        lines = [msgspec.json.decode(line, type=Line) for line in others]
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{path} is not what shardlab_recorder.py writes: {sentence(error)}.") from error
    if unknown := next((line.phase for line in lines if line.phase not in PHASES), None):
        raise UserError(f"{path} has the phase {unknown!r}, which shardlab_recorder.py does not write.")
    for line in lines:
        if not FILE.fullmatch(line.file) or os.path.islink(os.path.join(os.path.dirname(path), line.file)):
            raise UserError(f"{path} names the file {line.file!r}, but values are in a safetensors file in the same "
                            "folder. Record it again.")
    return about, lines


def check_ranks(folder: str, abouts: list[About]) -> None:
    """Raise UserError unless there is a list of each rank."""
    there, ranks = {about.rank for about in abouts}, max(about.ranks for about in abouts)
    missing = next((rank for rank in range(ranks) if rank not in there), None)
    if missing is not None:
        raise UserError(f"{folder} is of {ranks} ranks, but the list of rank {missing} is not there. Record again, "
                        "with a recorder on every rank and one folder for all.")


def parts_of(folder: str, key: TheirKey, held: list[tuple[About, Line]],
             arrays: dict[str, dict[str, "Array"]]) -> tuple[list[tuple[TensorPart, ReadValues]], str, tuple[str, ...]]:
    """Return the parts of a tensor with the places of their values, its format, and the names of its dimensions."""
    texts = {line.dims for _, line in held}
    if len(texts) > 1:
        raise UserError(f"{folder}: the ranks say different dims of {key}: {' and '.join(sorted(texts))}. If they are "
                        'the stages of a pipeline, tell the recorder: axes={"pp": (stage, stages)}, with other axes.')
    try:
        dims: tuple[Dim, ...] = parse(texts.pop())
    except ValueError as error:
        raise UserError(f"{folder}: the dims of {key} cannot be read: {error}.") from error
    stored, locals_, formats = {}, [], set()
    for about, line in held:
        path = path_of(folder, about, line)
        if line.key not in arrays[path]:
            raise UserError(f"{path} lacks the tensor {line.key}, which its rank's list names: {key}.")
        array = arrays[path][line.key]
        stored[about.rank] = path, line.key
        locals_.append(Local(about.rank, array.shape, about.axes))
        formats |= {array.format, line.inside} & FORMATS.keys()
    dims = dims if locals_[0].shape else ()
    return ([(one.part, partial(read_array, *stored[one.part.rank], one.inside))
             for one in place(str(key), dims, locals_)],
            max(formats, key=lambda form: FORMATS[form].epsilon), tuple(dim.name for dim in dims))


# ---- the order of computation ---------------------------------------------------------------------------------------


def in_order(lists: list[tuple[About, list[Line]]]) -> list[TheirKey]:
    """Return all tensors in the order of computation: steps, and phases, and in a phase the order in which a rank has
    met them; a pipeline's stages one after the other, backward from the last.
    """
    place: dict[TheirKey, tuple] = {}
    for about, lines in lists:
        stage = about.axes.get("pp", (0, 1))[0]
        for n, line in enumerate(lines):
            backward = line.phase in REVERSED
            # Gradients are met in the order of the parameters; all before clipping, then all after it.
            at = (line.call, -n) if line.phase == "gradients" else (0, n)
            place.setdefault(line.tensor, (line.step, PHASES.index(line.phase), -stage if backward else stage, at))
    return sorted(place, key=place.__getitem__)


# ---- values ---------------------------------------------------------------------------------------------------------


class Array(NamedTuple):
    """The shape and the format of an array in a file."""

    shape: tuple[int, ...]
    format: str             # float64 stands for whole numbers, too, which it holds


def format_of(dtype: np.dtype) -> str:
    """Return the name of a floating-point format, and float64 for what it holds."""
    return dtype.name if dtype.name in FORMATS else "float64"


def path_of(folder: str, about: About, line: Line) -> str:
    return os.path.join(folder, line.file or f"rank_{about.rank:05}_{line.step}.safetensors")


def arrays_in(path: str) -> dict[str, Array]:
    """Return the arrays of a file, of which only the head is read. Raises UserError."""
    if path.endswith(".pt"):
        with opened_saved(path) as saved:
            saved.check(value := saved.content["value"])
            return {"value": Array(value.shape, format_of(np.dtype(value.dtype)))}
    with opened(path) as file:
        heads = {key: file.get_slice(key) for key in list(file.keys())}
        arrays = {key: Array(tuple(head.get_shape()), STORED.get(head.get_dtype(), "float64"))
                  for key, head in heads.items()}
    for key, array in arrays.items():
        try:
            np.broadcast_to(0.0, array.shape)
        except ValueError as error:
            raise UserError(f"{path} has {key} in a shape that no array can have: {error}.") from error
    return arrays


def read_array(path: str, key: str, inside: tuple[slice, ...] = ()) -> Any:
    """Read a part of an array of a file. Raises UserError for a format that NumPy does not have."""
    if path.endswith(".pt"):
        with opened_saved(path) as saved:
            return saved.load(saved.content["value"])[inside]
    with opened(path) as file:
        try:
            return file.get_tensor(key)[inside]
        except (AttributeError, SafetensorError) as error:      # of 8 bits or fewer, which NumPy does not have
            raise UserError(f"{path} has {key} in a format that is not read here: {error}.") from error


def opened(path: str) -> Any:
    if not is_there(path):
        raise UserError(f"{path} is missing: the rank was ended before its step did, or its files are not all here.")
    check_readable(path)
    try:
        return safe_open(path, "np")
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file, or is damaged: {error}.") from error


def names_of(run: TheirRun) -> set[str]:
    return {key.name for key in run.parts}
