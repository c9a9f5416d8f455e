"""The frame of a demo: options, an introduction, and a check at the end.

    @program(HIDDEN_SIZE.parse)
    def show(demo, h): ...

makes a program of `show`: it takes the ranks and the command line, and ends with the sentence of the check.
"""
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from math import gcd
from textwrap import fill
from typing import Any

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.launch.entry import ArgumentParser, run
from mpi_impl.runtime.tables import WIDTH, aligned, bytes_of, count
from reference.config import option, require_divides, require_positive, round_up
from reference.errors import UserError
from reference.params import split, tree_map
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

    def say(self, text: str) -> None:
        """Print on rank 0 a text that is the same on all ranks."""
        say(self.ranks, text)

    def say_each(self, text: str) -> None:
        """Print each rank's own text. The rank's number stands before its first line."""
        self.say(prefix_with_ranks(self.ranks.allgather_objects(text)))

    def say_aligned(self, *cells: str) -> None:
        """Print a line for each rank, with their cells aligned in columns."""
        self.say(prefix_with_ranks(aligned(self.ranks.allgather_objects(cells), left=range(len(cells))).split("\n")))

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

    def shards(self, what: str, found, whole, tensors) -> None:
        """Compare each tensor of this rank's shard with its shard of the textbook's `whole` tree."""
        tree_map(lambda *pair: self.equal(what, *pair), found, split(whole, tensors, self.n)[self.rank])

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
    least: int                              # the default, or the first number from here on that the ranks can shard
    help: str = ""
    times: int = 0                          # the ranks shard this many times the size evenly; 0: they need not
    numbers: Callable[[int, int], int] = lambda n, size: size      # of all arrays of n ranks, from n and the size

    def parse(self, argv: Arguments, n: int) -> int:
        """Return the size that is given, or one that suits n ranks. Raises UserError."""
        parser, factor = parser_of(self.demo), f"{self.times} " * (self.times > 1)
        rule = f"{self.help} (default: {self.least})"
        if self.times:
            rule = (f"{self.help} {factor}{self.letter} must be a multiple of the number of ranks (default: the first "
                    f"such from {self.least} on)")
        parser.add_argument(self.option, type=int, metavar=self.letter, dest="size", help=rule.strip())
        size = parser.parse_args(argv).size
        if size is None:
            return round_up(self.least, n // gcd(n, self.times))      # gcd(n, 0) is n
        name = self.option.removeprefix("--").replace("-", "_")
        check_size(name, size, self.numbers(n, size))
        if self.times:
            require_divides("The number of ranks", n, f"{factor}{name}", self.times * size,
                            "Every rank gets an equal part.")
        return size


def check_size(name: str, value: int, numbers: int) -> None:
    """Raise UserError for a size below 1, or one for which the ranks' arrays, of this many numbers, would fill the
    machine.

    The formulas for `numbers` are rough: they count the terms that grow fastest, at the demo's peak.
    """
    require_positive(name, value)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (size := np.dtype(np.float64).itemsize * numbers) > memory:
        raise UserError(f"{option(name)} is {value:,}, with which the ranks' arrays would take about {bytes_of(size)}, "
                        f"but this machine has {bytes_of(memory)}. Choose a smaller one.")
