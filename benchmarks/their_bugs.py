"""A test of `shardlab compare` on another program: bugs in a parallel GPT of PyTorch, and what it names for each.

    .venv/bin/python benchmarks/their_bugs.py               # ten minutes on two cores

contenders/parallel_gpt.py records itself on one rank, and on 2 to 8 ranks without a bug, which must agree; then with
each bug of torch_bugs.py in a copy of it. The right place is the first tensor that is wrong, as torch_bugs.py has it.
It needs PyTorch 2.15.
"""
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from programs import head, parser_of, row
from torch_bugs import BUGS, CLIP, CONTROLS, Layout, TorchBug

from mpi_impl.launch.entry import run_alone
from reference.errors import UserError
from shardlab.compare.their_runs import RECORDER, read_run
from shardlab.compare.their_runs.differences import Comparison

PROGRAM = Path(__file__).parent / "contenders" / "parallel_gpt.py"
SECONDS = 300       # after which ranks are taken for hanging
AGREE = "agree"


class Found(NamedTuple):
    """The result of a comparison with a run."""

    place: str          # the first tensor that differs, or AGREE
    relative: float     # how large the difference is, or the largest of a run that agrees
    refused: str = ""   # why the two could not be compared

    @property
    def cells(self) -> tuple[str, str]:
        shapes = self.refused.partition(", when")[0]
        return (f"refused: {shapes}", "") if self.refused else (self.place, f"{self.relative:.1e}")


class Runs:
    """Recordings of the program in a folder, each made once."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        shutil.copy(RECORDER, self.folder)

    def found(self, layout: Layout, bug: TorchBug | None = None) -> Found:
        """Compare a run of this layout with one rank's, without the bug."""
        alone = Layout(options=tuple(option for option in layout.options if option in CLIP))
        try:
            found = Comparison(read_run(self.record(alone)), read_run(self.record(layout, bug))).findings()
        except UserError as error:
            return Found("", 0, str(error))
        if found.differences:
            return Found(str(found.differences[0].key), found.differences[0].relative)
        assert found.worst is not None
        return Found(AGREE, found.worst.relative)

    def record(self, layout: Layout, bug: TorchBug | None = None) -> str:
        """Run the program on the layout's ranks, and return the folder of its recording."""
        name = "_".join([str(layout), bug.name if bug else "right"]).replace(" ", "-")
        folder, program = self.folder / name, self.folder / f"{name}.py"
        if not folder.exists():
            program.write_text(text_with(bug), encoding="utf-8")
            run_ranks([sys.executable, str(program), *map(str, layout[:3]), str(folder), *layout.options], layout.ranks)
        return str(folder)


def text_with(bug: TorchBug | None) -> str:
    """Return the program's text, with the bug."""
    text = PROGRAM.read_text(encoding="utf-8")
    if bug is None:
        return text
    if text.count(bug.right) != 1:
        raise SystemExit(f"error: {bug.right!r} of the bug {bug.name!r} is not once in {PROGRAM.name}.")
    return text.replace(bug.right, bug.wrong)


def run_ranks(command: list[str], ranks: int) -> None:
    """Run a program on ranks, with the environment that torchrun gives them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    started = [subprocess.Popen(command, env={**os.environ, **job, "RANK": str(rank)}, stdout=subprocess.DEVNULL)
               for rank in range(ranks)]
    try:
        if any(process.wait(SECONDS) for process in started):
            raise SystemExit(f"error: `{' '.join(command)}` failed.")
    finally:
        for process in started:
            process.kill()


def judged(bug: TorchBug, found: Found) -> str:
    """Say whether the comparison names the first tensor that is wrong."""
    if found.place == bug.place or found.refused.startswith(bug.place):
        return "yes"
    return "**not seen**" if found.place == AGREE else f"**no**: {bug.place}"


def print_table(runs: Runs, bugs: Iterable[TorchBug]) -> None:
    """Print a row for each layout without a bug, and one for each bug."""
    print(head("bug", "reported in", "axis", "ranks", "first tensor named", "relative", "right place"), flush=True)
    for layout in CONTROLS:
        print(row("none", "", "", layout, *runs.found(layout).cells, ""), flush=True)
    for bug in bugs:
        found = runs.found(bug.layout, bug)
        print(row(bug.name, bug.source, bug.axis, bug.layout, *found.cells, judged(bug, found)), flush=True)


def main() -> None:
    parser = parser_of("their_bugs", __doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="bugs with this in their name")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        print_table(Runs(folder), [bug for bug in BUGS if options.only in bug.name])


if __name__ == "__main__":
    run_alone(main)
