"""The sizes that a demo's user may choose."""
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from mpi_impl.launch.entry import ArgumentParser
from mpi_impl.runtime.tables import bytes_of
from reference.config import option, require_divides, require_positive, round_up
from reference.errors import UserError


@dataclass(frozen=True)
class ShardedSize:
    """The only option of a demo: a size that the ranks shard evenly."""

    demo: str
    description: str                        # of the demo
    name: str                               # of the size
    letter: str
    help: str
    least: int                              # the default is the first size from here on that the ranks can shard
    numbers: Callable[[int, int], int]      # of all arrays of n ranks, from n and the size
    why: str                                # the number of ranks must divide the size
    times: int = 1                          # or this many times the size

    def parse(self, argv: Sequence[str] | None, n: int) -> int:
        """Return the size that is given, or one that suits n ranks. Raises UserError."""
        parser = ArgumentParser(prog=f"mpi_impl.demos.{self.demo}", description=self.description)
        parser.add_argument(option(self.name), type=int, metavar=self.letter, help=self.help)
        size = getattr(parser.parse_args(argv), self.name)
        if size is None:
            return round_up(self.least, n // gcd(n, self.times))
        check_size(self.name, size, self.numbers(n, size))
        whole = self.name if self.times == 1 else f"{self.times} {self.name}"
        require_divides("The number of ranks", n, whole, self.times * size, self.why)
        return size


def check_size(name: str, value: int, numbers: int) -> None:
    """Raise UserError for a size below 1, or one for which the ranks' arrays, of so many numbers, would fill the
    machine.

    The formulas for `numbers` are rough: they count the terms that grow fastest, at the demo's peak.
    """
    require_positive(name, value)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (size := np.dtype(np.float64).itemsize * numbers) > memory:
        raise UserError(f"{option(name)} is {value:,}, with which the ranks' arrays would take about {bytes_of(size)}, "
                        f"but this machine has {bytes_of(memory)}. Choose a smaller one.")
