"""The output of a demo, by one rank for all of them: whole lines, in the order of ranks."""
import os
from collections.abc import Sequence
from textwrap import fill

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.ledger import Ledger, ring_bytes
from mpi_impl.runtime.rank_environment import ON_TERMINAL
from mpi_impl.runtime.tables import WIDTH, aligned
from reference.params import leaves, split

SHOWN = 4      # elements of an array that fit on a line
COLORS = (34, 32, 35, 36, 33, 31, 94, 92)       # of ranks, as terminals number them


def say(ranks: Group, text: str) -> None:
    """Print on rank 0 a text that is the same on all ranks."""
    if ranks.rank == 0:
        print(text, flush=True)


def say_each(ranks: Group, text: str) -> None:
    """Print each rank's own text, in rank order. The rank's number stands before its first line."""
    say(ranks, prefix_with_ranks(ranks.allgather_objects(text)))


def say_aligned(ranks: Group, *cells: str) -> None:
    """Print a line for each rank, in rank order, with their cells aligned in columns."""
    say(ranks, prefix_with_ranks(aligned(ranks.allgather_objects(cells), left=range(len(cells))).split("\n")))


def prefix_with_ranks(texts: Sequence[str]) -> str:
    """Return each rank's text behind 'rank 0: ', 'rank 1: ', ..."""
    leads = [f"rank {rank}: " for rank in range(len(texts))]
    return "\n".join(colored(rank, indent(lead.ljust(len(leads[-1])), text))
                     for rank, (lead, text) in enumerate(zip(leads, texts)))


def colored(rank: int, text: str) -> str:
    """Return the text in the rank's colour, if the launcher's output is a terminal."""
    return f"\x1b[{COLORS[rank % len(COLORS)]}m{text}\x1b[0m" if ON_TERMINAL in os.environ else text


def indent(lead: str, text: str) -> str:
    """Return the text with its first line behind `lead`, and the others as far to the right."""
    return "\n".join("  " + (" " * len(lead) if i else lead) + line for i, line in enumerate(text.split("\n")))


def shape(x) -> str:
    """Return a shape as text: '[2, 4, 8]'."""
    return str(list(x.shape))


def span(start: int, stop: int, what: str) -> str:
    """Return 'columns 8 to 15', 'column 3' or 'no columns', for the range from start to stop, exclusive."""
    if stop - start < 2:
        return f"{what} {start}" if stop > start else f"no {what}s"
    return f"{what}s {start} to {stop - 1}"


def first_elements(x) -> str:
    """Return the first few elements of an array, rounded, without -0: enough to see whether arrays differ."""
    flat = np.ravel(x)
    return " ".join(f"{round(value, 3) + 0.0:+.3f}" for value in flat[:SHOWN]) + (" ..." if flat.size > SHOWN else "")


def traffic_table(ledger: Ledger) -> str:
    """Return one rank's ledger as a table; 'bytes it sends' assumes that collectives run as rings."""
    rows = [["phase", "operation", "why", "calls", "elements", "bytes it sends"]]
    rows += [[entry.phase, entry.operation, entry.reason, f"{total.calls:,}", f"{total.elements:,}",
              f"{ring_bytes(entry, total):,.0f}"] for entry, total in ledger.totals.items()]
    return aligned(rows, left=(0, 1, 2))


class Check:
    """A comparison of a rank's results with the textbook's, and a last sentence about how well they agree."""

    def __init__(self, tolerance: float = 1e-12):
        """Set the relative tolerance, for float64: sums in another order differ by rounding."""
        self.tolerance, self.worst, self.compared = tolerance, 0.0, list[str]()

    def equal(self, what: str, found, expected) -> None:
        """Compare two arrays. Raises AssertionError if an element differs by more than the tolerance, relative to the
        largest element.
        """
        found, expected = np.asarray(found), np.asarray(expected)
        if found.shape != expected.shape:
            raise AssertionError(f"{what} has shape {shape(found)}, but the textbook's has {shape(expected)}")
        largest = float(np.abs(expected).max(initial=0.0)) or 1.0
        off = float(np.abs(found - expected).max(initial=0.0)) / largest
        if not off <= self.tolerance:
            raise AssertionError(f"{what} differs from the textbook's by {off:.1e} of its largest element")
        self.worst, self.compared = max(self.worst, off), [*self.compared, what]

    def shards(self, ranks: Group, what: str, found, whole, tensors) -> None:
        """Compare each tensor of this rank's shard with its shard of the textbook's `whole` tree."""
        expected = split(whole, tensors, ranks.size)[ranks.rank]
        for (_, shard), (_, textbooks) in zip(leaves(found), leaves(expected), strict=True):
            self.equal(what, shard, textbooks)

    def conclude(self, ranks: Group) -> None:
        """Print the last sentence of a demo, once all ranks have succeeded. It names what was compared."""
        worst, names = max(ranks.allgather_objects(self.worst)), list(dict.fromkeys(self.compared))
        how = f"to {worst:.0e} of the largest element" if worst else "to the last bit"
        say(ranks, fill("The check against reference/, which computes everything whole, in one process: "
                        f"{and_list(names)} are the same on {count(ranks.size)}, {how}.", WIDTH))


def and_list(names: Sequence[str]) -> str:
    """Return 'a', 'a and b' or 'a, b and c'."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def count(n: int, what: str = "rank") -> str:
    """Return '1 rank' or '8 ranks'."""
    return f"{n:,} {what}" + "s" * (n != 1)
