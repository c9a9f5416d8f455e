"""The order of each rank's work in a recorded step: actions, calls of groups, and tensors.

Its times are those of a clock that ticks with every recorded tensor (TickingClock), so two runs that do the same have
the same times.
"""
from typing import NamedTuple

from mpi_impl.comm.ledger import Entry, Total, wire_bytes
from mpi_impl.comm.trace import Slice


class Call(NamedTuple):
    """A call of a group of several ranks, and where in its step a rank made it."""

    at: float
    action: str      # '2B0', or '' between actions
    unit: str        # the layer at work there, '' if there is none
    entry: Entry
    elements: int

    @property
    def purpose(self) -> tuple[str, ...]:
        """Return what the call is for, whatever it moves and among whom."""
        return self.action, self.unit, self.entry.phase, self.entry.reason

    @property
    def place(self) -> str:
        """Return the place as 'the backward of blocks.3, action 2B0'."""
        unit = f" of {self.unit}" if self.unit else ""
        return f"the {self.entry.phase}{unit}{self.action and f', action {self.action}'}"

    def __str__(self):
        entry, name = self.entry, self.entry.operation.replace("_", "-")
        return (f"a{'n' * (name[0] == 'a')} {name} of {wire_bytes(entry, Total(1, self.elements)):,} bytes over the "
                f"{entry.group} group ({entry.group_size} ranks; {entry.reason})")


class SeenPart(NamedTuple):
    """A part of a tensor, and when its rank saw it last."""

    at: float
    phase: str
    name: str
    first: tuple[int, ...]      # coordinates of its first element


class RankStep(NamedTuple):
    """One rank's step."""

    slices: list[Slice]
    calls: list[Call]
    seen: list[SeenPart]
