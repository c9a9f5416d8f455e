"""The first tensor, in the order of computation, that two runs on exact numbers do not have in common.

Each tensor is assembled from the first run that has it: the textbook, then one rank, then all ranks. Every holder of a
part is compared with it, element by element: identical numbers, or other formulas. Partial sums are compared as their
sum, and what a backward has recomputed with the forward's.
"""
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from reference.exact.array import as_exact
from shardlab.compare.differences import Holder, summed
from shardlab.compare.names import Key
from shardlab.compare.recording import TensorPart, whole_shape

Parts = list[tuple[Key, TensorPart, Any]]


class PlayedRun(NamedTuple):
    """The recorded parts of one run."""

    name: str
    parts: Parts


class OtherFormula(NamedTuple):
    """A tensor that is another formula on a holder than in an earlier run."""

    key: Key
    holder: Holder
    expected: str           # the name of the run that has the tensor as it should be
    at: tuple[int, ...]     # coordinates, in the whole tensor, of the first such element
    shape: tuple[int, ...]  # of the whole tensor
    others: int             # elements of the part that are other formulas


@dataclass
class Comparison:
    """The result: what was compared until the first other formula, if there is one."""

    compared: int = 0       # tensors of the last run that an earlier run has, too
    in_first: int = 0       # those of them that the first run has
    last: Key | None = None         # of the tensors that agree
    found: OtherFormula | None = None


class KnownTensor:
    """A whole tensor, as far as runs have shown it, and the run of each element."""

    def __init__(self, shape: tuple[int, ...], like):
        self.values, self.source = np.zeros_like(like, shape=shape), np.full(shape, -1)

    def differ(self, holder: Holder):
        """Return a mask of the holder's elements that are known, and others."""
        return (self.source[holder.box] >= 0) & (self.values[holder.box] != holder.values)

    def learn(self, holder: Holder, source: int) -> None:
        """Take over the elements that no earlier holder had."""
        new = self.source[holder.box] < 0
        self.values[holder.box] = np.where(new, holder.values, self.values[holder.box])
        self.source[holder.box] = np.where(new, source, self.source[holder.box])


def compare_formulas(runs: Sequence[PlayedRun]) -> Comparison:
    """Compare runs, the one to be proved last, up to the first other formula."""
    held = [holders_by_key(run) for run in runs]
    shapes = whole_shapes(held)
    known, result = dict[Key, KnownTensor](), Comparison()
    for key in sorted({key for holders in held for key in holders}, key=lambda key: key.order):
        for source, holders in enumerate(held):
            for holder in holders.get(key, ()):
                result.found = compare_with_known(key, holder, source, known, shapes[forward(key)], runs)
                if result.found:
                    return result
        result.last = key
        result.compared += key in held[-1] and any(forward(key) in holders for holders in held[:-1])
        result.in_first += key in held[-1] and forward(key) in held[0]
    return result


def compare_with_known(key, holder, source: int, known, shape, runs) -> OtherFormula | None:
    """Compare one holder's part with what is known of the tensor, and add it to that."""
    tensor = known.setdefault(forward(key), KnownTensor(shape, holder.values))
    differ = tensor.differ(holder)
    if differ.any():
        inside = np.unravel_index(int(differ.argmax()), differ.shape)
        at = tuple(int(i) + along.start for i, along in zip(inside, holder.box))
        return OtherFormula(key, holder, runs[tensor.source[at]].name, at, shape, int(differ.sum()))
    tensor.learn(holder, source)
    return None


def forward(key: Key) -> Key:
    """Return the key of the forward's tensor for one that a backward has recomputed; else the key itself."""
    return key._replace(phase="forward") if key.phase == "recompute" else key


def whole_shapes(held: Iterable[dict[Key, list[Holder]]]) -> dict[Key, tuple[int, ...]]:
    """Return the shape of each whole tensor."""
    together = defaultdict[Key, list[Holder]](list)
    for holders in held:
        for key, own in holders.items():
            together[forward(key)] += own
    return {key: whole_shape(own) for key, own in together.items()}


def holders_by_key(run: PlayedRun) -> dict[Key, list[Holder]]:
    """Return the holders of each tensor of a run; for partial sums, all ranks as one."""
    parts = defaultdict(list)
    for key, part, values in run.parts:
        parts[key].append((part, as_exact(values)))     # initial weights are floats in the textbook
    return {key: summed(run.name, [part for part, _ in own],
                        [Holder(run.name, (part.rank,), part.box, values) for part, values in own])
            for key, own in parts.items()}
