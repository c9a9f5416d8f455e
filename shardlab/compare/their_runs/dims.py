"""The place of a rank's part of a tensor, from a text that names the dimensions and the axes that divide them.

    b s[cp:zigzag] heads[tp] d          heads are divided by tp; along s a rank of cp has chunks i and 2c - 1 - i of 2c
    t[cp:zigzag,sp] 1 h                 of which sp, the innermost axis, divides each rank's two chunks again
    h[tp:partial]                       the whole is the sum over tp
    t h # tp:replicated dp:=attn_dp     what is behind # is for other readers: an axis that is not named is replicated

This is the grammar of SGLang's comparator (sgl-project/sglang, python/sglang/srt/debug_utils/comparator/dims_spec).
"""
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from reference.errors import UserError
from reference.positions import SequencePart, zigzag
from shardlab.compare.recording import TensorPart

DIM = re.compile(r"(\w+|\(\w+(?:\*\w+)+\))(?:\[([^\[\]]*)\])?")
MOD = re.compile(r"(\w+)(?::(\w+(?:\+\w+)*))?")
QUALIFIERS = {"zigzag", "natural", "partial", "sharded"}

Coordinates = Mapping[str, tuple[int, int]]     # of a rank: its number along each axis, and the axis's size


class Mod(NamedTuple):
    """An axis that divides a dimension."""

    axis: str
    zigzag: bool
    partial: bool


class Dim(NamedTuple):
    """A dimension, and what divides it, the outermost first."""

    name: str
    mods: tuple[Mod, ...]

    @property
    def sharding(self) -> tuple[Mod, ...]:
        return tuple(mod for mod in self.mods if not mod.partial)


class Local(NamedTuple):
    """One rank's part of a tensor."""

    rank: int
    shape: tuple[int, ...]
    coordinates: Coordinates


def parse(text: str) -> tuple[Dim, ...]:
    """Parse the text. Raises ValueError with a sentence for one that makes no sense."""
    dims = tuple(parse_dim(word) for word in text.partition("#")[0].split())
    axes = [mod.axis for dim in dims for mod in dim.mods]
    if twice := next((axis for axis in axes if axes.count(axis) > 1), None):
        raise ValueError(f"{text!r} has the axis {twice} twice")
    return dims


def parse_dim(word: str) -> Dim:
    found = DIM.fullmatch(word)
    if not found:
        raise ValueError(f"{word!r} is no dimension, as in s[cp:zigzag,sp]")
    return Dim(found[1], tuple(parse_mod(mod.strip()) for mod in (found[2] or "").split(",") if mod.strip()))


def parse_mod(word: str) -> Mod:
    found = MOD.fullmatch(word)
    qualifiers = set((found[2] or "").split("+")) - {""} if found else set()
    if not found or qualifiers - QUALIFIERS or {"zigzag", "natural"} <= qualifiers:
        raise ValueError(f"{word!r} is no axis, as in tp, cp:zigzag or tp:partial")
    return Mod(found[1], "zigzag" in qualifiers, "partial" in qualifiers)


class Placed(NamedTuple):
    """A box of the whole tensor, and where it is in the rank's array."""

    part: TensorPart
    inside: tuple[slice, ...]


def place(name: str, dims: Sequence[Dim], locals_: Sequence[Local]) -> list[Placed]:
    """Return the boxes of a tensor of which the ranks have these arrays.

    Where the whole is a sum, the first rank along each axis that is not named counts, since the others have copies.
    Raises UserError for arrays that are not parts of one tensor.
    """
    for one in locals_:
        if len(one.shape) != len(dims):
            raise UserError(f"{name} has {len(one.shape)} dimensions on rank {one.rank}, but {len(dims)} by its dims, "
                            f"{written(dims)}. Give the recorder the right dims.")
    summed = any(mod.partial for dim in dims for mod in dim.mods)
    named = {mod.axis for dim in dims for mod in dim.mods}
    if summed:
        locals_ = [one for one in locals_
                   if all(i == 0 for axis, (i, _) in one.coordinates.items() if axis not in named)]
    runs_of = [runs_along(name, dim, i, locals_) for i, dim in enumerate(dims)]
    found = []
    for n, one in enumerate(locals_):
        for runs in product(*(runs[n] for runs in runs_of)):
            part = TensorPart(one.rank, tuple(whole.start for whole, _ in runs),
                              tuple(whole.stop - whole.start for whole, _ in runs), summed)
            found.append(Placed(part, tuple(inside for _, inside in runs)))
    return found


def runs_along(name: str, dim: Dim, i: int, locals_: Sequence[Local]) -> list[list[tuple[slice, slice]]]:
    """Return, for each array, the slices of the whole along a dimension that it has, and where each is in it."""
    def at(one: Local) -> tuple[int, ...]:
        return tuple(one.coordinates.get(mod.axis, (0, 1))[0] for mod in dim.sharding)

    sizes: dict[tuple[int, ...], int] = {}
    for one in locals_:
        if sizes.setdefault(at(one), one.shape[i]) != one.shape[i]:
            raise UserError(f"{name} has {one.shape[i]} and {sizes[at(one)]} elements along its dimension {dim.name} "
                            f"on ranks that should have the same ones, by its dims, {written([dim])}.")
    check_all_there(name, dim, sizes, locals_)
    if dim.sharding and dim.sharding[0].zigzag:
        return [zigzag_runs(name, dim, at(one), one, sizes) for one in locals_]
    starts, stop = {}, 0
    for place in sorted(sizes):
        starts[place], stop = stop, stop + sizes[place]
    return [[(slice(starts[at(one)], starts[at(one)] + sizes[at(one)]), slice(0, sizes[at(one)]))] for one in locals_]


def check_all_there(name: str, dim: Dim, sizes: Iterable[tuple[int, ...]], locals_: Sequence[Local]) -> None:
    """Raise UserError if nobody has some part along a dimension."""
    counts = [max(one.coordinates.get(mod.axis, (0, 1))[1] for one in locals_) for mod in dim.sharding]
    for place in product(*(range(n) for n in counts)):
        if place not in set(sizes):
            where = ", ".join(f"{mod.axis} {number}" for mod, number in zip(dim.sharding, place))
            raise UserError(f"{name} lacks the part of the rank with {where} along its dimension {dim.name}: that "
                            "rank's file is missing, or it has called this module less often, or not at all. (If the "
                            'ranks are stages of a pipeline, tell the recorder: axes={"pp": (stage, stages)}.)')


def zigzag_runs(name: str, dim: Dim, at: tuple[int, ...], one: Local,
                sizes: Mapping[tuple[int, ...], int]) -> list[tuple[slice, slice]]:
    """Return the slices of a rank that has a part of two chunks: one, or two."""
    rank, *inner = at
    own = {place[1:]: size for place, size in sizes.items() if place[0] == rank}
    start = sum(size for place, size in own.items() if place < tuple(inner))
    c = max(place[0] for place in sizes) + 1
    if sum(own.values()) % 2:
        raise UserError(f"{name} has {sum(own.values())} elements along {dim.name} on a rank of "
                        f"{dim.sharding[0].axis}, which are not two chunks of one size, as zigzag has them.")
    part = SequencePart(rank, zigzag(c, c * sum(own.values())))
    found, inside = [], 0
    for run in part.runs(slice(start, start + own[tuple(inner)])):
        found.append((run, slice(inside, inside + run.stop - run.start)))
        inside += run.stop - run.start
    return found


def written(dims: Sequence[Dim]) -> str:
    """Return the text of these dims again."""
    def of(mod: Mod) -> str:
        return mod.axis + ":zigzag" * mod.zigzag + ":partial" * mod.partial

    return " ".join(f"{dim.name}[{','.join(map(of, dim.mods))}]" if dim.mods else dim.name for dim in dims)
