"""The frame of a demo: options, an introduction, and a check at the end.

    @program(HIDDEN_SIZE.parse)
    def show(demo, h): ...

makes a program of `show`: it takes the ranks and the command line, and ends with the sentence of the check.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from textwrap import fill
from typing import Any

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.launch.entry import ArgumentParser, run
from mpi_impl.runtime.tables import WIDTH, aligned, count
from reference.config import option, require_divides, require_positive, round_up
from reference.errors import UserError
from reference.params import leaves
from shardlab.demos import title
from shardlab.demos.printing import and_list, prefix_with_ranks, say, shape, span, traffic_table

Arguments = Sequence[str] | None      # of the command line; None: those of this process


class Demo:
    """A demo at work: it prints whole lines in the order of ranks, and compares its results with the textbook's."""

    def __init__(self, ranks: Group):
        self.ranks, self.rank, self.n, self.phase = ranks, ranks.rank, ranks.size, ranks.ledger.phase
        self.tolerance = 1e-12      # relative, for float64: sums in another order differ by rounding
        self.worst, self.compared = 0.0, list[str]()

    # ---- output ----

    def introduce(self, text: str, **numbers) -> None:
        """Print an introduction, with the number of ranks, and other numbers, in their places."""
        self.say(text.format(ranks=count(self.n), **numbers))

    def say(self, text: str = "") -> None:
        """Print on rank 0 a text that is the same on all ranks."""
        say(self.ranks, text)

    def say_each(self, *cells: str) -> None:
        """Print each rank's text behind its number, or a line for each rank with their cells aligned in columns."""
        everyone = self.ranks.allgather_objects(cells)
        self.say(prefix_with_ranks([text for text, in everyone] if len(cells) == 1 else
                                   aligned(everyone, left=range(len(cells))).split("\n")))

    def say_traffic(self, explanation: str, **like) -> None:
        """Print what each rank sent and why, or the entries of its ledger with these values in the named fields."""
        self.say(f"\nWhat moved, on each rank. {explanation}\n{traffic_table(self.ranks.ledger, **like)}\n")

    def say_all_reduces(self) -> None:
        """Print the same, where ranks have done all-reduces only."""
        self.say_traffic(f"Of N elements an all-reduce sends 2 N (t-1)/t, here with t = {self.n}:")

    def own(self, length: int) -> slice:
        """Return this rank's equal part of a length."""
        n = length // self.n
        return slice(self.rank * n, (self.rank + 1) * n)

    def share(self, length: int, what: str) -> str:
        """Return that part as text: 'columns 8 to 15'."""
        own = self.own(length)
        return span(own.start, own.stop, what)

    # ---- the check ----

    def equal(self, what: str, found, expected) -> None:
        """Compare two arrays, or all arrays of two trees. Raises AssertionError if an element differs by more than the
        tolerance, relative to the largest element.
        """
        for (_, x), (_, y) in zip(leaves(found), leaves(expected), strict=True):
            self.equal_arrays(what, np.asarray(x), np.asarray(y))

    def equal_arrays(self, what: str, found: np.ndarray, expected: np.ndarray) -> None:
        if found.shape != expected.shape:
            raise AssertionError(f"{what} has shape {shape(found)}, but the textbook's has {shape(expected)}")
        largest = float(np.abs(expected).max(initial=0.0)) or 1.0
        off = float(np.abs(found - expected).max(initial=0.0)) / largest
        if not off <= self.tolerance:
            raise AssertionError(f"{what} differs from the textbook's by {off:.1e} of its largest element")
        self.worst, self.compared = max(self.worst, off), [*self.compared, what]

    def conclude(self) -> None:
        """Print the last sentence, once all ranks have succeeded. It names what was compared, if anything."""
        if not self.compared:
            return
        worst, names = max(self.ranks.allgather_objects(self.worst)), list(dict.fromkeys(self.compared))
        how = f"to {worst:.0e} of the largest element" if worst else "to the last bit"
        self.say(fill("The check against reference/, which computes everything whole, in one process: "
                      f"{and_list(names)} are the same on {count(self.n)}, {how}.", WIDTH))


def program(parse: Callable[[Arguments, int], Any]) -> Callable[[Callable], Callable]:
    """Call the function with a Demo, and with what `parse` makes of the command line for this many ranks."""
    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def show(ranks: Group, argv: Arguments = None) -> None:
            options, demo = parse(argv, ranks.size), Demo(ranks)
            function(demo, options)
            demo.conclude()
        return show
    return decorate


def run_demo(show: Callable) -> None:
    """Run a demo as the program of this process."""
    run(lambda: show(world()))


# ---- options --------------------------------------------------------------------------------------------------------


def parser_of(name: str) -> ArgumentParser:
    """Return the parser of a demo, without options."""
    return ArgumentParser(prog=f"shardlab.demos.{name}", description=f"{title(name)}.")


@dataclass(frozen=True)
class Size:
    """The only option of a demo: a number from 1 on."""

    option: str
    demo: str
    letter: str
    least: int              # the default; of a sharded size the first multiple of the number of ranks from here on
    help: str = ""
    sharded: bool = True
    most: int = 1_000       # a demo holds everything twice, on the ranks and whole

    def parse(self, argv: Arguments, n: int) -> int:
        """Return the size that is given, or one that suits n ranks. Raises UserError."""
        parser = parser_of(self.demo)
        default = round_up(self.least, n) if self.sharded else self.least
        rule = ", a multiple of the number of ranks" * self.sharded
        parser.add_argument(self.option, type=int, metavar=self.letter, dest="size", default=default,
                            help=f"{self.help}{rule} (default: {default})".strip(" ,"))
        size, name = parser.parse_args(argv).size, self.option.removeprefix("--").replace("-", "_")
        require_positive(name, size)
        if size > max(self.most, default):
            raise UserError(f"{option(name)} is {size:,}, but a demo holds everything twice, on the ranks and whole. "
                            f"Choose at most {self.most:,}.")
        if self.sharded:
            require_divides("The number of ranks", n, name, size, "Every rank gets an equal part.")
        return size
