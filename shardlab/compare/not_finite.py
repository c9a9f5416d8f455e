"""The first tensor of a step, in the order of computation, with an element that is infinite or NaN.

A step whose gradients are not finite has moved no weight, so it can be computed again with an observer that looks for
such elements. It looks at every tensor, which takes time: so only such a step is observed.
"""
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.arrays import to_host
from shardlab.compare.names import Key
from shardlab.compare.observer import Observer


class Finding(NamedTuple):
    """A part of a tensor that is not finite."""

    key: Key
    rank: int
    at: tuple[int, ...]     # coordinates, in the whole tensor, of the first such element
    value: float
    bad: int                # such elements, in the part
    size: int               # elements of the part


class FiniteCheck(Observer):
    """An observer that keeps the first part that is not finite."""

    def __init__(self, state: ModelState):
        super().__init__(state)
        self.found: Finding | None = None

    def see(self, phase: str, name: str, x: Any, first: tuple[int, ...], summed: bool = False) -> None:
        key = Key(self.iteration, phase, name)
        if self.found is not None and (self.found.key.order, self.found.at) <= (key.order, first):
            return
        values = to_host(x)
        bad = ~np.isfinite(values)
        if bad.any():
            at = np.unravel_index(int(bad.argmax()), bad.shape)
            self.found = Finding(key, self.topology.world.rank, tuple(int(i) + start for i, start in zip(at, first)),
                                 float(values[at]), int(bad.sum()), bad.size)

    def describe(self) -> str:
        """Describe the place of the first infinity or NaN of all ranks. All ranks call this, and get the same text."""
        everyone = [found for found in self.topology.world.allgather_objects(self.found) if found is not None]
        if not everyone:
            return "Computed once more the step is finite: the machine does not compute the same twice."
        first = min(everyone, key=lambda found: (found.key.order, found.rank))
        others = [str(found.rank) for found in everyone if found.key == first.key and found.rank != first.rank]
        layer = "" if first.key.layer is None else f", layer {first.key.layer}"
        also = f" (and on {', '.join(others)})" if others else ""
        begins = ("The weights were not finite when the step began:" if first.key.phase == "parameters" else
                  "In the order of computation it appears first in")
        gradient = "the gradient of " if first.key.of_a_gradient else ""
        return (f"{begins} {gradient}{first.key.name}, phase {first.key.phase}{layer}, on rank {first.rank}{also}: "
                f"{first.bad:,} of its {first.size:,} elements there, the first at {list(first.at)}, which is "
                f"{first.value}.")
