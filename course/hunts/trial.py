"""A trial of a fault: whether a run with it ends as if it were right, differs, and is refuted by a theorem.

The theorem is that of `shardlab prove`: every tensor of two steps is the same formula as in one process.
"""
import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from textwrap import wrap
from typing import Any, NamedTuple

from course.hunts.faults import Fault, level_of
from mpi_impl.launch.pool import RankFailure
from reference.errors import UserError
from shardlab.compare.differences import compare
from shardlab.compare.recording import read
from shardlab.compare.report import report
from shardlab.programs.gpt import PretrainingGPT
from shardlab.programs.settings import parse
from shardlab.prove import proof
from shardlab.prove.options import parse as parse_proof
from shardlab.prove.sizes import shrink
from tests.planted import StaleBug, buggy_codes, planted_run
from tests.small_pools import SmallPools
from tests.zoo.entry import Bug
from tools.mutants.planting import observed_run

ROOT = Path(__file__).parents[2]
TEXT = "LICENSE"        # the corpus of all runs
STEPS = ("--train-iters", "10", "--log-interval", "1", "--eval-iters", "0")
PATIENCE = 15.0     # seconds in which a run of ten small steps must end
PROOFS = 2


class Evidence(NamedTuple):
    """The remains of a run with a fault: the level at which it shows, and what a student gets to read."""

    level: str
    printed: str
    ledger: str         # the lines that are not those of the right program
    compared: str


class Trials:
    """Trials of faults on a pool of ranks. What runs without a fault have left is kept."""

    def __init__(self, pools: SmallPools, folder: Path):
        """Keep recordings in the folder."""
        self.pools, self.folder = pools, folder
        self.kept: dict[tuple, Any] = {}

    def once(self, what: str, fault: Fault, compute: Callable[[], Any]) -> Any:
        """Return what is computed once for all faults of the same run."""
        key = what, fault.ranks, fault.options
        if key not in self.kept:
            self.kept[key] = compute()
        return self.kept[key]

    def of(self, fault: Fault) -> Evidence | None:
        """Return the evidence of a run with this fault; None if it cannot be hunted."""
        right = self.once("recording", fault, lambda: self.recorded(fault))
        with TemporaryDirectory(dir=self.folder) as folder:
            try:
                buggy_codes(fault.bug)
                printed = self.run(fault, Path(folder), fault.bug)
                wrong = read(folder)
                found = compare(read(str(right)), wrong)
                if not found.differences or not self.refuted(fault):
                    return None
            except (RankFailure, StaleBug, UserError):
                return None
            first = found.differences[0].key
            level = level_of(f"{first.iteration} {first.phase}: {first.name}")
            return Evidence(level, said_of(printed), changed_lines(right, Path(folder)),
                            report(found, read(str(right)), wrong))

    def runs(self, fault: Fault) -> bool:
        """Report whether a rank runs a line that the fault changes."""
        observed = self.once("lines", fault, lambda: self.pools.run(
            fault.ranks, observed_run, train, self.argv(fault), timeout=8 * PATIENCE))
        return any(line in lines.get(fault.bug.file, ()) for _, lines in observed
                   for line in range(fault.lines[0], fault.lines[1] + 1))

    def recorded(self, fault: Fault) -> Path:
        """Return the folder of a recording of the same run without the fault."""
        folder = Path(mkdtemp(dir=self.folder))
        self.run(fault, folder)
        return folder

    def run(self, fault: Fault, folder: Path, bug: Bug | None = None) -> str:
        """Train with the fault's options, and return what is printed. Raises RankFailure."""
        argv = (*self.argv(fault), "--record", str(folder), "--ledger", str(folder / "ledger.json"))
        program = (planted_run, bug, train) if bug else (train,)
        return self.pools.run(fault.ranks, *program, argv, timeout=PATIENCE)[0]

    def argv(self, fault: Fault) -> tuple[str, ...]:
        return (*fault.options, *STEPS, "--data-path", str(ROOT / TEXT), "--data-cache-path",
                str(self.folder / "cache"))

    def refuted(self, fault: Fault) -> bool:
        """Report whether the theorem fails with the fault, and holds without it."""
        if self.once("theorem", fault, lambda: self.differ(fault, differs)):
            return False
        try:
            return self.differ(fault, planted_run, fault.bug, differs)
        except RankFailure:
            return True

    def differ(self, fault: Fault, *program) -> bool:
        """Report whether a proof with one of a few seeds finds a difference."""
        return any(self.pools.run(fault.ranks, *program, fault.options, seed, timeout=2 * PATIENCE)[0]
                   for seed in range(PROOFS))


def train(group, argv: tuple[str, ...]) -> str:
    """Run pretrain_gpt on the ranks of a pool, and return what it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        program = PretrainingGPT(parse(argv, group.size, "gpt"), group)
        try:
            program.run()
        finally:
            program.at_the_end.close()      # gives groups back that a run without an end still holds
    return printed.getvalue()


def differs(group, options: tuple[str, ...], seed: int) -> bool:
    """Report whether a proof of the run finds a tensor that is another formula."""
    found = proof.prove(group, shrink(parse_proof(options, group.size)[0]), seed)
    return found is not None and found.comparison.found is not None


def command(fault: Fault) -> str:
    """Return the command of a run, for a shell."""
    words = (*fault.options, *STEPS, "--data-path", TEXT, "--record", "recorded", "--ledger", "ledger.json")
    joined = re.sub(" (?!--)", "~", " ".join(words))         # each option with its value
    return " \\\n    ".join([f"python -m mpi_impl.launch -n {fault.ranks} -m mpi_impl.pretrain_gpt",
                             *wrap(joined, 100, break_on_hyphens=False)]).replace("~", " ")


# ---- what the student reads -----------------------------------------------------------------------------------------


def said_of(printed: str) -> str:
    """Return the lines about iterations, without times, which differ from run to run, and that about messages."""
    lines = printed.splitlines()
    return "\n".join([line.rsplit(" | lr", 1)[0] for line in lines if line.startswith("iteration")] +
                     [line for line in lines if line.startswith(("traffic", "memory"))])


def changed_lines(right: Path, wrong: Path) -> str:
    """Return the lines of a run's ledger that are not those of the right program's run. Arguments are their folders.

    A run cannot be compared with its own prediction: that is made by the same program, with the bug in it.
    """
    before, after = messages(right), messages(wrong)
    return "\n".join(f"{line}: {after.get(line, 'nothing')}; the right program: {before.get(line, 'nothing')}"
                     for line in before | after if before.get(line) != after.get(line))


def messages(folder: Path) -> dict[str, str]:
    """Return how much a run has sent, by what for."""
    return {", ".join(line[key] for key in ("group", "phase", "reason", "operation", "dtype")):
            f"{line['calls']} calls with {line['elements']:,} elements"
            for line in json.loads((folder / "ledger.json").read_text())}
