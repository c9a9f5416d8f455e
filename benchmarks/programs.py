"""Shared parts of the benchmarks' programs: options that are counts, and rows of tables."""
from argparse import Namespace
from collections.abc import Sequence

from mpi_impl.launch.entry import ArgumentParser
from mpi_impl.runtime.outputs import check_outputs
from reference.config import require_positive


def parser_of(name: str, doc: str | None) -> ArgumentParser:
    """Return the parser of a program, which the first line of its docstring describes."""
    return ArgumentParser(prog=name, description=(doc or "").splitlines()[0])


def parse(parser: ArgumentParser, argv: Sequence[str] | None = None, plot: str = "",
          **counts: tuple[int, str]) -> Namespace:
    """Add an option for each count, with its default and its help, and one for a picture; and parse. Raises UserError.
    """
    for name, (default, about) in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{about} (default: {default})")
    if plot:
        parser.add_argument("--plot", metavar="FILE", help=plot)
    options = parser.parse_args(argv)
    for name in counts:
        require_positive(name, getattr(options, name))
    if plot:
        check_outputs(options)      # now, and not after minutes
    return options


def row(*cells: object) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: object) -> str:
    """Return the first two rows of a table in Markdown."""
    return f"{row(*cells)}\n{'|---' * len(cells)}|"
