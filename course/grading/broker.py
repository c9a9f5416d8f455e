"""The broker of one run: it passes messages between ranks, computes collectives, and counts what each rank sends.

The ranks' processes run answers, and are not trusted. They have no connection to one another, only to the broker's
process. So nothing can be sent that a task does not allow, or that is not counted.
"""
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import numpy as np

from course.grading.lab_group import COLLECTIVES, LARGEST_MESSAGE, OPERATIONS, TO_ONE, as_array

WAITS_FOR = {"send": "to send to", "receive": "to receive from", "exchange": "to exchange with"}


class OperationEnd(NamedTuple):
    """The end of an operation for one rank: its result, or an exception that the rank raises."""

    rank: int
    value: Any = None
    error: str = ""         # the exception's name
    sentence: str = ""


@dataclass
class Waiting:
    """An operation in which a rank waits."""

    operation: str
    x: Any
    to: int | None = None           # the rank that has yet to receive x
    source: int | None = None       # the rank that has yet to send
    option: Any = None              # op or axis of a collective
    received: Any = None

    @property
    def other(self) -> int | None:
        """Return the rank that it waits for; None if it needs all ranks."""
        return self.to if self.to is not None else self.source


class Refused(Exception):
    """An operation that cannot be done. Its arguments are the name of an exception, and the sentence for the author."""


class Broker:
    """The operations of `size` ranks, which may use those that `allowed` names."""

    def __init__(self, size: int, allowed: Collection[str]):
        self.size, self.allowed = size, allowed
        self.waiting: dict[int, Waiting] = {}
        self.messages = [0] * size          # arrays that each rank has sent to others; a collective counts as one
        self._elements = [0] * size         # elements that it has sent to others, times `size`, so that none is lost

    @property
    def sent(self) -> list[int]:
        """Return the number of elements that each rank has sent to others."""
        return [elements // self.size for elements in self._elements]

    def begin(self, rank: int, operation: Any, x: Any, first: Any, second: Any) -> list[OperationEnd]:
        """Begin an operation of a rank. Return what ends with it: operations of this rank and of others."""
        try:
            self.waiting[rank] = self._check(rank, operation, x, first, second)
        except Refused as refused:
            return [OperationEnd(rank, None, *refused.args)]
        return self._collective() if operation in COLLECTIVES else self._pass_on(rank)

    def _check(self, rank: int, operation: Any, x: Any, first: Any, second: Any) -> Waiting:
        """Return the operation to wait in. Raises Refused, or TypeError if x is no array."""
        if operation not in self.allowed or operation not in OPERATIONS:
            raise Refused("PermissionError", f"group.{operation} may not be used here. This task allows: "
                                             f"{', '.join(self.allowed) or 'nothing'}.")
        if operation not in ("receive", "barrier") and check_array(x).nbytes > LARGEST_MESSAGE:
            raise Refused("ValueError", f"an array of {x.nbytes:,} bytes is too large to send: {LARGEST_MESSAGE:,} "
                                        "are the limit.")
        if operation in COLLECTIVES:
            return Waiting(operation, x, option=first)
        others = {"send": (first, None), "receive": (None, first), "exchange": (first, second)}[operation]
        for other in others if operation == "exchange" else (first,):
            if not isinstance(other, int) or not 0 <= other < self.size:
                raise Refused("ValueError", f"rank {rank} of {self.size}: there is no rank {str(other)[:20]} to "
                                            f"{operation} with. Ranks are numbered from 0 to {self.size - 1}.")
            if other == rank and operation != "exchange":
                raise Refused("ValueError", f"rank {rank} would {operation} with itself, and wait for ever.")
        return Waiting(operation, x, *others)

    def _pass_on(self, rank: int) -> list[OperationEnd]:
        """Pass on what this rank sends, and what it receives, if the other rank is ready."""
        mine = self.waiting[rank]
        to, source = mine.to, mine.source
        if to is not None:
            self._transfer(rank, to)
        if source is not None:
            self._transfer(source, rank)
        return [OperationEnd(one, self.waiting.pop(one).received) for one in set(self.waiting) & {rank, to, source}
                if self.waiting[one].operation in TO_ONE and self.waiting[one].other is None]

    def _transfer(self, sender: int, receiver: int) -> None:
        """Pass an array on, if both ranks wait for it."""
        out, into = self.waiting.get(sender), self.waiting.get(receiver)
        if out and into and out.to == receiver and into.source == sender:
            into.received, out.to, into.source = out.x, None, None
            if sender != receiver:
                self._count(sender, self.size * count_elements(out.x))

    def _collective(self) -> list[OperationEnd]:
        """Compute the collective when all ranks have come to it."""
        if len(self.waiting) < self.size or any(one.operation in TO_ONE for one in self.waiting.values()):
            return []
        everyone = [self.waiting.pop(rank) for rank in range(self.size)]
        try:
            results, elements = combine(everyone)
        except Refused as refused:
            return [OperationEnd(rank, None, *refused.args) for rank in range(self.size)]
        for rank in range(self.size):
            self._count(rank, elements * (self.size - 1))
        return [OperationEnd(rank, result) for rank, result in enumerate(results)]

    def _count(self, rank: int, elements: int) -> None:
        self.messages[rank] += self.size > 1
        self._elements[rank] += elements

    def describe_waits(self) -> list[str]:
        """Describe what each rank waits for, and the cycle if there is one."""
        lines = []
        for rank, what in sorted(self.waiting.items()):
            if what.other is None:
                lines.append(f"rank {rank} is in {what.operation}, which needs all ranks.")
            else:
                lines.append(f"rank {rank} waits {WAITS_FOR[what.operation]} rank {what.other}.")
        cycle = find_cycle({rank: what.other for rank, what in sorted(self.waiting.items()) if what.other is not None})
        if cycle:
            lines.append(f"They wait in a cycle: {' -> '.join(map(str, [*cycle, cycle[0]]))}. One rank must go first.")
        return lines


def check_array(x: Any) -> np.ndarray:
    """Return an array of a kind that can be sent. Raises TypeError for anything else."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"a {type(x).__name__} is no array")
    return as_array(x)


def count_elements(x: np.ndarray) -> int:
    """Return how many numbers an array tells its receivers. Without elements, these are its lengths but for the 0."""
    return x.size or max(x.ndim - 1, 0)


def combine(everyone: list[Waiting]) -> tuple[list, int]:
    """Return the ranks' results of a collective, and the elements of which each rank sends (p - 1)/p. Raises Refused.
    """
    operation, option, xs = everyone[0].operation, everyone[0].option, [one.x for one in everyone]
    for rank, one in enumerate(everyone):
        if (one.operation, one.option) != (operation, option):
            raise Refused("ValueError", f"all ranks must call the same collectives in the same order, with the same op "
                          f"or axis: rank 0 is in {operation}, rank {rank} in {one.operation}.")
    if operation == "barrier":
        return [None] * len(xs), 0
    try:
        if operation == "all_gather":
            return [np.concatenate(xs, option)] * len(xs), sum(map(count_elements, xs))
        total = add_up(xs, option if operation == "all_reduce" else "sum")
        if operation == "all_reduce":
            return [total] * len(xs), 2 * count_elements(total)
        return np.array_split(total, len(xs), option), count_elements(total)
    except (ValueError, TypeError, IndexError) as error:        # of axes
        raise Refused("ValueError", str(error)) from None


def add_up(xs: list[np.ndarray], op: Any) -> np.ndarray:
    """Return the elementwise sum or maximum. Raises Refused."""
    if op not in ("sum", "max"):
        raise Refused("ValueError", f"op is {str(op)[:20]!r}, but must be 'sum' or 'max'.")
    kinds = [f"{x.dtype} {list(x.shape)}" for x in xs]
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        raise Refused("ValueError", "only arrays of the same shape and dtype can be added up: rank 0 has passed "
                                    f"{kinds[0]}, rank {other} has passed {kinds[other]}.")
    total = xs[0].copy()
    with np.errstate(all="ignore"):
        for x in xs[1:]:
            (np.add if op == "sum" else np.maximum)(total, x, out=total)
    return total


def find_cycle(waits_for: Mapping[int, int]) -> list[int]:
    """Return the ranks of a cycle, in which each waits for the next and the last for the first; [] if there is none."""
    try:
        TopologicalSorter({rank: [other] for rank, other in waits_for.items()}).prepare()
    except CycleError as error:
        return error.args[1][:0:-1]
    return []
