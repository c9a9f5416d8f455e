"""What a stage's loop asks for: a unit's tensors, for as long as it uses them, wherever they are in between.

A unit is what is used together: a block, the final layer norm, a table (reference/parallel/layout.py). A stage is a
tree with a unit in the place of each block. The loop opens one, and neither it nor the layers know whether the tensors
were there (`Unit`) or had to be gathered (ZeRO-3, parallel/zero.py).
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
        """They will be needed soon."""

    def wait(self):
        """They are needed now -> the tree of tensors."""
        return self.tensors

    def release(self) -> None:
        """They are needed no more."""


@contextmanager
def materialized(units):
    """`with materialized(...) as p:` a tree of units is one of tensors."""
    tree_map(lambda unit: unit.prefetch(), units)
    try:
        yield tree_map(lambda unit: unit.wait(), units)
    finally:
        tree_map(lambda unit: unit.release(), units)


def in_turn(units: dict[int, Any], layers: Iterable[int]) -> Generator:
    """The tensors of each layer's unit, one after another. While one is used the next is on its way.

    Who loops lets go of the tensors before it asks for the next ones: a name that still stands for them keeps them.
    """
    layers = list(layers)
    for layer, following in zip(layers, [*layers[1:], None]):
        with materialized(units[layer]) as tensors:
            if following is not None:
                units[following].prefetch()
            yield tensors
            del tensors
