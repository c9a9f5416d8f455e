"""The output of a demo, by one rank for all of them: whole lines, in the order of ranks."""
import os
from collections.abc import Sequence

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.ledger import Ledger, matches, ring_bytes
from mpi_impl.runtime.rank_environment import ON_TERMINAL
from mpi_impl.runtime.tables import aligned

SHOWN = 4      # elements of an array that fit on a line
COLORS = (34, 32, 35, 36, 33, 31, 94, 92)       # of ranks, as terminals number them


def say(ranks: Group, text: str) -> None:
    """Print on rank 0 a text that is the same on all ranks."""
    if ranks.rank == 0:
        print(text, flush=True)


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


def preview(x) -> str:
    """Return an array's shape and its first elements."""
    return f"{shape(x)}: {first_elements(x)}"


def first_elements(x) -> str:
    """Return the first few elements of an array, rounded, without -0: enough to see whether arrays differ."""
    flat = np.ravel(x)
    return " ".join(f"{round(value, 3) + 0.0:+.3f}" for value in flat[:SHOWN]) + (" ..." if flat.size > SHOWN else "")


def traffic_table(ledger: Ledger, **like) -> str:
    """Return one rank's ledger as a table, or its entries with these values in the named fields. 'bytes it sends'
    assumes that collectives run as rings.
    """
    rows = [["phase", "operation", "why", "calls", "elements", "bytes it sends"]]
    rows += [[entry.phase, entry.operation, entry.reason, f"{total.calls:,}", f"{total.elements:,}",
              f"{ring_bytes(entry, total):,.0f}"] for entry, total in ledger.totals.items() if matches(entry, like)]
    return aligned(rows, left=(0, 1, 2))


def sent_bytes(ledger: Ledger, **like) -> float:
    """Return the bytes that one rank sends in the ledger's entries with these values in the named fields."""
    return sum(ring_bytes(entry, total) for entry, total in ledger.totals.items() if matches(entry, like))


def and_list(names: Sequence[str]) -> str:
    """Return 'a', 'a and b' or 'a, b and c'."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
