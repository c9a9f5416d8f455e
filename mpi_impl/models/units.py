"""Units: tensors that a stage uses together, such as a block, the final layer norm or a table.

A stage is a tree with a unit in place of each (reference/parallel/layout.py). Its loop materializes a unit for as
long as it uses the tensors. Neither the loop nor the layers know whether the tensors were there all the time (`Unit`)
or had to be gathered (ZeRO-3, parallel/zero.py).
"""
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from reference.params import tree_map


class Unit:
    """Tensors that are always there: parameters, or gradients to add to."""

    def __init__(self, name: str, tensors):
        self.name, self.tensors = name, tensors

    def prefetch(self) -> None:
        """Begin to materialize the tensors: they will be needed soon."""

    def wait(self):
        """Return the tree of tensors, as soon as they are there."""
        return self.tensors

    def release(self) -> None:
        """Give up the tensors: they are not needed any more."""


@contextmanager
def materialized(units):
    """Turn a tree of units into a tree of tensors: `with materialized(...) as p:`."""
    tree_map(lambda unit: unit.prefetch(), units)
    try:
        yield tree_map(lambda unit: unit.wait(), units)
    finally:
        tree_map(lambda unit: unit.release(), units)


def in_turn(units: dict[int, Any], layers: Iterable[int]) -> Generator:
    """Yield the tensors of each layer's unit, one after another. While one is used the next is prefetched.

    The caller must drop the tensors before it asks for the next ones: any name that still refers to them keeps them.
    """
    layers = list(layers)
    for layer, following in zip(layers, [*layers[1:], None]):
        with materialized(units[layer]) as tensors:
            if following is not None:
                units[following].prefetch()
            yield tensors
            del tensors
