"""The ledger: which arrays moved between the ranks, in which group, in which phase of the step, and why.

Every collective over arrays and every send writes here. Wire bytes are the size of the whole array: before an
all_reduce, reduce_scatter, broadcast or send, after an all_gather. Ring-equivalent bytes are what each rank would send
if the collective ran as a ring, which is how the papers count. If ranks are on several hosts, a share of these
crosses from one to another: hosts.py has the count.
"""
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import ml_dtypes  # noqa: F401  it tells NumPy what "bfloat16" is
import numpy as np

from reference.comm.ring import RING


class Entry(NamedTuple):
    """The properties that the calls of one line of the ledger have in common."""

    operation: str    # all_reduce, all_gather, reduce_scatter, all_to_all, all_to_all_rows, broadcast, send
    group: str        # world, tensor, context, data, replicas, pipeline, embedding, model
    group_size: int   # ranks in the group
    phase: str        # forward, backward, optimizer, ...
    reason: str       # what needed it: 'attention output', 'loss: maximum', ...
    dtype: str        # of the elements on the wire


class Total(NamedTuple):
    """The sum over the calls of one entry, on this rank."""

    calls: int = 0
    elements: int = 0


class Ledger:
    """Totals by entry, in the order in which the entries first appeared."""

    def __init__(self):
        self.totals: dict[Entry, Total] = defaultdict(Total)
        self.crossing: dict[Entry, float] = defaultdict(float)      # on several hosts: elements, times what crosses
        self.listener: Callable[[Entry, int], None] | None = None      # is told of each call, and its elements
        self._phase = "outside a step"

    @contextmanager
    def phase(self, name: str):
        """Assign the calls inside the `with` block to this phase."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def record(self, operation: str, group: str, group_size: int, reason: str, elements: int, dtype,
               crossing: float | None = None) -> None:
        """Add one call. A group of one rank is recorded like any other: its ring-equivalent bytes are zero.

        `crossing` is the share that goes from one host to another; None on one host.
        """
        entry = Entry(operation, group, group_size, self._phase, reason, name_of(dtype))
        calls, sent = self.totals[entry]
        self.totals[entry] = Total(calls + 1, sent + elements)
        if crossing is not None:
            self.crossing[entry] += crossing * elements
        if self.listener:
            self.listener(entry, elements)

    @contextmanager
    def diverted(self):
        """Yield a ledger that the calls inside the `with` block are written into, in place of this one."""
        other = Ledger()
        mine, self.totals = self.totals, other.totals
        try:
            yield other
        finally:
            self.totals = mine

    def add(self, other: "Ledger") -> None:
        """Add another rank's totals."""
        for entry, (calls, elements) in other.totals.items():
            mine = self.totals[entry]
            self.totals[entry] = Total(mine.calls + calls, mine.elements + elements)
        for entry, crossing in other.crossing.items():
            self.crossing[entry] += crossing

    def elements(self, **like) -> int:
        """Return the elements of all entries with these values in the named fields: `elements(phase="forward")`."""
        return sum(t.elements for e, t in self.totals.items() if matches(e, like))

    def calls(self, **like) -> int:
        """Return the calls of all entries with these values in the named fields."""
        return sum(t.calls for e, t in self.totals.items() if matches(e, like))


@cache
def name_of(dtype) -> str:
    """Return the name of a dtype, which NumPy finds slowly, and every message needs."""
    return np.dtype(dtype).name


def matches(entry: Entry, like: dict) -> bool:
    return all(getattr(entry, field) == value for field, value in like.items())


def wire_bytes(entry: Entry, total: Total) -> int:
    """Return the bytes of the whole arrays."""
    return total.elements * np.dtype(entry.dtype).itemsize


def ring_bytes(entry: Entry, total: Total) -> float:
    """Return the bytes that one rank would send if each call ran as a ring."""
    return RING[entry.operation](wire_bytes(entry, total), entry.group_size)


def bytes_between_hosts(ledger: Ledger, entry: Entry) -> float:
    """Return the ring-equivalent bytes that cross between hosts, as the mean over the group's ranks."""
    crossing = ledger.crossing.get(entry, 0.0) * np.dtype(entry.dtype).itemsize
    return RING[entry.operation](crossing, entry.group_size)
