"""How a demo speaks: with one voice for all ranks, in whole lines, in the ranks' order."""
import os
from collections.abc import Sequence

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.ledger import Ledger, ring_bytes
from mpi_impl.runtime.tables import aligned, bytes_of
from reference.config import option, require_positive
from reference.errors import UserError

SHOWN = 4      # elements of an array that a line can hold


def say(ranks: Group, text: str) -> None:
    """What all ranks would say alike: rank 0 prints it."""
    if ranks.rank == 0:
        print(text, flush=True)


def say_each(ranks: Group, text: str) -> None:
    """What every rank says for itself, in rank order. The first line is led by the rank's number, others follow it."""
    say(ranks, led_by_rank(ranks.allgather_objects(text)))


def say_aligned(ranks: Group, *cells: str) -> None:
    """What every rank says for itself in one line, its cells below those of the rank before."""
    say(ranks, led_by_rank(aligned(ranks.allgather_objects(cells), left=range(len(cells))).split("\n")))


def led_by_rank(texts: Sequence[str]) -> str:
    leads = [f"rank {rank}: " for rank in range(len(texts))]
    return "\n".join(indented(lead.ljust(len(leads[-1])), text) for lead, text in zip(leads, texts))


def indented(lead: str, text: str) -> str:
    return "\n".join("  " + (" " * len(lead) if i else lead) + line for i, line in enumerate(text.split("\n")))


def shape(x) -> str:
    """[2, 4, 8]"""
    return str(list(x.shape))


def span(start: int, stop: int, what: str) -> str:
    """'columns 8 to 15', 'column 3', or 'no columns': from start up to, but without, stop."""
    if stop - start < 2:
        return f"{what} {start}" if stop > start else f"no {what}s"
    return f"{what}s {start} to {stop - 1}"


def first_elements(x) -> str:
    """The first few elements of an array, rounded, with no -0: enough to see that they differ, or do not."""
    flat = np.ravel(x)
    return " ".join(f"{round(value, 3) + 0.0:+.3f}" for value in flat[:SHOWN]) + (" ..." if flat.size > SHOWN else "")


def traffic_table(ledger: Ledger) -> str:
    """What one rank's ledger holds; 'sends' is what the rank sends of each array if the collective runs as a ring."""
    rows = [["phase", "operation", "why", "calls", "elements", "bytes it sends"]]
    rows += [[entry.phase, entry.operation, entry.reason, f"{total.calls:,}", f"{total.elements:,}",
              f"{ring_bytes(entry, total):,.0f}"] for entry, total in ledger.totals.items()]
    return aligned(rows, left=(0, 1, 2))


def check_size(name: str, value: int, numbers: int) -> None:
    """Raises UserError for a size below 1, or with which the ranks' arrays, of so many numbers, would fill the machine.

    Formulas of numbers are rough: what a demo holds at its worst, of the terms that grow fastest.
    """
    require_positive(name, value)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (size := np.dtype(np.float64).itemsize * numbers) > memory:
        raise UserError(f"{option(name)} is {value:,}, with which the ranks' arrays would take about {bytes_of(size)}, "
                        f"but this machine has {bytes_of(memory)}. Choose a smaller one.")


class Check:
    """Holds what a rank computed against the textbook, and says at the end how well all of it agreed."""

    def __init__(self, tolerance: float = 1e-12):
        """Relative, and for float64: sums in another order differ by rounding."""
        self.tolerance, self.worst, self.compared = tolerance, 0.0, list[str]()

    def equal(self, what: str, found, expected) -> None:
        """Raises AssertionError if an element differs by more than the tolerance, relative to the largest element."""
        found, expected = np.asarray(found), np.asarray(expected)
        if found.shape != expected.shape:
            raise AssertionError(f"{what} has shape {shape(found)}, but the textbook's has {shape(expected)}")
        largest = float(np.abs(expected).max(initial=0.0)) or 1.0
        off = float(np.abs(found - expected).max(initial=0.0)) / largest
        if not off <= self.tolerance:
            raise AssertionError(f"{what} differs from the textbook's by {off:.1e} of its largest element")
        self.worst, self.compared = max(self.worst, off), [*self.compared, what]

    def conclude(self, ranks: Group) -> None:
        """The last sentence of a demo, once all ranks are content. It names what was compared."""
        worst, names = max(ranks.allgather_objects(self.worst)), list(dict.fromkeys(self.compared))
        how = f"to {worst:.0e} of the largest element" if worst else "to the last bit"
        say(ranks, f"The check against reference/, which computes it whole, in one process: {and_list(names)} are the "
                   f"same on {count(ranks.size)}, {how}.")


def and_list(names: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def count(n: int, what: str = "rank") -> str:
    """'1 rank', '8 ranks'."""
    return f"{n:,} {what}" + "s" * (n != 1)
