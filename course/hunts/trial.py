"""A trial of a fault: whether a run with it ends as if it were right, differs, and is refuted by a theorem.

The theorem is that of `shardlab prove`: every tensor of two steps is the same formula as in one process.
"""
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from course.hunts.faults import Fault, level_of
from mpi_impl.launch.pool import RankFailure
from reference.errors import UserError
from shardlab.compare.differences import compare
from shardlab.compare.recording import read
from shardlab.compare.report import report
from shardlab.programs.arguments import parse
from shardlab.programs.gpt import PretrainingGPT
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
    """Trials of faults on a pool of ranks. Runs without a fault are recorded once."""

    def __init__(self, pools: SmallPools, folder: Path):
        """Keep recordings in the folder."""
        self.pools, self.folder = pools, folder
        self.right: dict[tuple, Path] = {}
        self.theorems: dict[tuple, bool] = {}
        self.lines: dict[tuple, list] = {}

    def of(self, fault: Fault) -> Evidence | None:
        """Return the evidence of a run with this fault; None if it cannot be hunted."""
        right = self.recorded(fault)
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
        key = fault.ranks, fault.options
        if key not in self.lines:
            argv = (*fault.options, *STEPS, "--data-path", str(ROOT / TEXT), "--data-cache-path",
                    str(self.folder / "cache"))
            self.lines[key] = self.pools.run(fault.ranks, observed_run, train, argv, timeout=8 * PATIENCE)
        return any(line in lines.get(fault.bug.file, ()) for _, lines in self.lines[key]
                   for line in range(fault.lines[0], fault.lines[1] + 1))

    def recorded(self, fault: Fault) -> Path:
        """Return the recording of the same run without the fault."""
        key = fault.ranks, fault.options
        if key not in self.right:
            folder = self.folder / f"right-{len(self.right)}"
            self.run(fault, folder)
            self.right[key] = folder
        return self.right[key]

    def run(self, fault: Fault, folder: Path, bug: Bug | None = None) -> str:
        """Train with the fault's options, and return what is printed. Raises RankFailure."""
        folder.mkdir(exist_ok=True)
        argv = (*fault.options, *STEPS, "--data-path", str(ROOT / TEXT), "--data-cache-path",
                str(self.folder / "cache"), "--record", str(folder), "--ledger", str(folder / "ledger.json"))
        if bug is None:
            return self.pools.run(fault.ranks, train, argv, timeout=PATIENCE)[0]
        return self.pools.run(fault.ranks, planted_run, bug, train, argv, timeout=PATIENCE)[0]

    def refuted(self, fault: Fault) -> bool:
        """Report whether the theorem fails with the fault, and holds without it."""
        if not self.proved(fault):
            return False
        try:
            return any(self.pools.run(fault.ranks, planted_run, fault.bug, differs, fault.options, seed,
                                      timeout=2 * PATIENCE)[0] for seed in range(PROOFS))
        except RankFailure:
            return True

    def proved(self, fault: Fault) -> bool:
        """Report whether the theorem holds for the run without the fault."""
        key = fault.ranks, fault.options
        if key not in self.theorems:
            self.theorems[key] = not any(self.pools.run(fault.ranks, differs, fault.options, seed,
                                                        timeout=2 * PATIENCE)[0] for seed in range(PROOFS))
        return self.theorems[key]


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
    options = [f"--{option}".strip() for option in " ".join(words).split("--")[1:]]     # each with its value
    lines, program = [""], f"python -m mpi_impl.launch -n {fault.ranks} -m mpi_impl.pretrain_gpt"
    for option in options:
        if len(lines[-1]) + len(option) > 100:
            lines.append("")
        lines[-1] += f" {option}"
    return " \\\n   ".join([program, *lines])


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
