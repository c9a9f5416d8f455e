"""Real ranks in a notebook: the cell magic `%%ranks`.

    %load_ext shardlab.notebook

    %%ranks 4
    x = np.full(3, rank)                     # this cell runs on four ranks, each a process of its own
    total = group.all_reduce(x, "a sum")

    ranks["total"]                           # in the notebook itself: every rank's value, in rank order
    ranks["x"] = np.zeros(3)                 # and the other way: give x to every rank

A cell can use `group`, `rank`, `size` and `np`. Variables that it sets are available in the next cell. Only `group` is
new in each cell, with a ledger of its own, so make objects that hold it, such as a region, in each cell. The ranks'
output is shown in rank order, and identical output once. If a rank raises, its traceback is shown, and where the other
ranks wait. A cell that hangs ends after its time limit; its ranks are ended, and their variables are lost.

With `%%ranks 4 --device cuda` the cell's arrays are on GPUs, `np` is CuPy, and collectives go by NCCL; ranks may share
one GPU (docs/gpus.md). After the cell its variables are on the host again.
"""
import argparse
import io
import pickle
import shlex
import sys
import traceback
from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class

from mpi_impl.launch.pool import Interrupted, Pool, RankFailure, interrupted, stories
from reference.errors import UserError
from reference.options import OptionParser
from shardlab.notebook.cell import run_cell, set_variable, value_of
from shardlab.notebook.running_cell import RunningCell

RANKS = 8           # of a notebook that asks for no more
TIME_LIMIT = 30.0   # seconds for a cell that does not set its own
LONGEST = 86_400    # seconds, a day: the system cannot wait for much longer times
GONE = ("The ranks have been ended, because one hung or died, and their variables are lost. The next %%ranks cell "
        "starts new ranks: run the cells above again, from the first that you need.")


class CellFailed(UserError):
    """A cell that did not finish on every rank. A notebook shows the message, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class Ranks:
    """The ranks of a notebook, seen from outside: `ranks["x"]` lists the x of each rank that ran the last cell."""

    def __init__(self, size: int = RANKS):
        self.size = self.last = size        # the ranks of the notebook, and those that ran the last cell
        self.pool = Pool(size, show=show)

    def __getitem__(self, name: str) -> list:
        found = self.run(self.last, TIME_LIMIT, value_of, name)
        for rank, (_, why_not) in enumerate(found):
            if why_not:
                raise CellFailed(f"ranks[{name!r}]: on rank {rank} {why_not}.")
        return [pickle.loads(value) for value, _ in found]

    def __setitem__(self, name: str, value: Any) -> None:
        self.run(self.size, TIME_LIMIT, set_variable, name, value)

    def run(self, n: int, limit: float, function, *args) -> list:
        """Call `function(group, *args)` on the first n ranks. Raises CellFailed if it does not return on all, and
        Interrupted if the reader interrupts it.
        """
        if n > self.size:
            raise CellFailed(f"{n} ranks were asked for, but this notebook has {self.size}. For more, run "
                             f"`ranks.restart({n})` in a cell of its own; the ranks' variables are then lost.")
        try:
            return self.pool.run(n, function, *args, timeout=limit)
        except RankFailure as failure:
            lines = [relative(line) for line in stories(failure.answers, failure.output)]
            head = f"The cell failed on {n} rank{'s' * (n != 1)}, with a time limit of {limit:g} s.\n"
            raise CellFailed("".join([head, *lines, "" if self.pool.up else f"\n{GONE}"])) from None
        except Interrupted as interrupt:
            answers = [answer._replace(detail=relative(answer.detail)) for answer in interrupt.answers]
            head = f"You interrupted the cell while it was running on {n} rank{'s' * (n != 1)}."
            raise interrupted(answers, head, f"\n{GONE}") from None
        except TypeError as error:      # a value that cannot be sent to a rank
            raise CellFailed(str(error)) from None

    def restart(self, size: int | None = None) -> None:
        """End the ranks. The next cell starts `size` new ones (default: as many as before)."""
        self.pool.close()
        if size is not None:
            self.size = self.last = size
            self.pool = Pool(size, show=show)


def show(printed: list[str]) -> None:
    """Print the output of ranks in rank order, with their numbers; identical output of several ranks only once."""
    together: dict[str, list[int]] = {}
    for rank, text in enumerate(printed):
        if text:
            together.setdefault(text, []).append(rank)
    leads = {text: lead(ranks, len(printed)) for text, ranks in together.items()}
    width = max(map(len, leads.values()), default=0)
    for text in together:
        for i, line in enumerate(text.splitlines()):
            print(f"{'' if i else leads[text]:>{width}} | {line}")


def lead(ranks: list[int], size: int) -> str:
    """Return 'rank 3', 'ranks 0-2, 5' or 'all 8 ranks'."""
    if len(ranks) == size > 1:
        return f"all {size} ranks"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    numbers = (str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(numbers)}"


def relative(text: str) -> str:
    """Return a traceback with files named relative to where Python finds them."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f'File "{folder}/', 'File "')
    return text


@magics_class
class RanksMagic(Magics):
    """The magic `%%ranks`."""

    def __init__(self, shell, ranks: Ranks):
        super().__init__(shell)
        self.ranks = ranks

    @cell_magic("ranks")    # type: ignore[arg-type]
    def run(self, line: str, cell: str) -> None:
        """Run this cell on N ranks, each a process of its own: %%ranks N [--timeout SECONDS] [--device cuda]."""
        n, limit, device = parse_line(line)
        here = RunningCell.of(self.shell, "%%ranks")
        title = f"In [{here.number}]"
        source = "\n" * here.lines_before + cell       # empty lines in place of the magic: line numbers are right
        check_syntax(source, title)
        self.ranks.last = min(n, self.ranks.size)
        self.ranks.run(n, limit, run_cell, source, title, device)


def parse_line(line: str) -> tuple[int, float, str]:
    """Parse '8 --timeout 5' to (8, 5.0, "cpu"). Raises CellFailed."""
    parser = OptionParser(prog="%%ranks", exit_on_error=False, add_help=False)
    parser.add_argument("n", type=int)
    parser.add_argument("--timeout", type=float, default=TIME_LIMIT)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    usage = ("Write `%%ranks 4` for four ranks, or `%%ranks 4 --timeout 5` for a time limit of five seconds; with "
             "`--device cuda` arrays are on GPUs.")
    try:
        options, unknown = parser.parse_known_args(shlex.split(line))
    except (argparse.ArgumentError, ValueError, SystemExit):
        raise CellFailed(f"%%ranks cannot use {line.strip()!r}. {usage}") from None
    if unknown or options.n < 1 or not 0 < options.timeout < float("inf"):
        raise CellFailed(f"%%ranks cannot use {line.strip()!r}. {usage}")
    if options.timeout > LONGEST:
        raise CellFailed(f"%%ranks cannot wait for {options.timeout:g} seconds: the limit is a day. {usage}")
    return options.n, options.timeout, options.device


def check_syntax(cell: str, title: str) -> None:
    """Raise CellFailed for a syntax error, before any rank gets the cell."""
    try:
        compile(cell, title, "exec")
    except SyntaxError as error:
        raise CellFailed("".join(traceback.format_exception_only(error))) from None


def as_png(figure) -> bytes:
    """Return a figure as a PNG that is sharp enough for a projector."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def load_ipython_extension(shell) -> None:
    """Add the magic, the name `ranks`, and the display of figures: `%load_ext shardlab.notebook`."""
    ranks = Ranks()
    shell.register_magics(RanksMagic(shell, ranks))
    shell.push({"ranks": ranks})
    png = shell.display_formatter.formatters["image/png"]
    png.for_type_by_name("matplotlib.figure", "Figure", as_png)
