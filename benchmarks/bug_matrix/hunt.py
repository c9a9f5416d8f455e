"""A bug hunt: each student gets a bug of the zoo, planted in the programs that they run, and not named.

    python -m benchmarks.bug_matrix.hunt alice                                      # alice's ranks and options
    python -m mpi_impl.launch -n 4 -m benchmarks.bug_matrix.hunt alice pretrain_gpt --zero-stage 1 ... --verify

The second line is a run with the bug in it, and with whatever helps to find it: --verify, --ledger, --record. Any
program of ranks can stand in place of pretrain_gpt, such as prove. An answer is a file, a line of it, and one of
the zoo's kinds: `grade` tells which of them are right.
"""
import hashlib
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.bug_matrix import results
from benchmarks.bug_matrix.settings import BugSetting, setting_of
from benchmarks.bug_matrix.verdict import SEEN
from reference.errors import UserError
from shardlab.command import module_of
from shardlab.plan import launch_line
from shardlab.programs.options import GPTPretrainingOptions
from shardlab.programs.settings import parse
from tests import zoo
from tests.planted import planted, source_of
from tests.zoo.entry import Entry

TOOLS = ("verify", "compare")       # one of them must see a bug that is hunted
CORPUS = {"vocab_size": 301, "make_vocab_size_divisible_by": 4, "train_iters": 20}


class Hunt(NamedTuple):
    """A bug to find, and the run in which it is live."""

    entry: Entry
    ranks: int
    options: list[str]


class Marks(NamedTuple):
    """The parts of an answer that are right."""

    file: bool
    line: bool
    kind: bool


def hunt_of(student: str) -> Hunt:
    """Return the hunt of a student, by any name. Bugs that the zoo gains or loses later change few students' hunts."""
    def drawn(hunt: Hunt) -> bytes:
        return hashlib.sha256(f"{student}\n{hunt.entry.name}".encode()).digest()

    return max(hunts(), key=drawn)


@cache
def hunts() -> tuple[Hunt, ...]:
    """Return all hunts: bugs that let a GPT's training end as if it were right, but that our tools see."""
    known, found = results.read(), []
    for entry in zoo.ENTRIES:
        setting, verdicts = setting_of(entry), known.get(entry.name, {})
        seen = {name for name, verdict in verdicts.items() if verdict.mark == SEEN}
        if (setting and setting.ranks > 1 and has_options(setting) and "by itself" not in seen
                and not seen.isdisjoint(TOOLS)):
            found.append(Hunt(entry, setting.ranks, options_of(setting)))
    return tuple(found)


def has_options(setting: BugSetting) -> bool:
    """Report whether pretrain_gpt's options describe the run exactly."""
    if not setting.case.model.causal or setting.order or setting.loads or setting.form != "float32":
        return False
    try:
        found = parse(options_of(setting), setting.ranks).parallel
    except UserError:
        return False
    plan = setting.plan if setting.plan.zero_stage < 3 else replace(setting.plan, bucket_size=found.ddp_bucket_size)
    return found == plan.parallel(setting.ranks, setting.case)


def options_of(setting: BugSetting) -> list[str]:
    """Return the options of pretrain_gpt that differ from what they are by default."""
    plan, parallel, default = setting.plan, setting.plan.parallel(setting.ranks, setting.case), GPTPretrainingOptions()
    shown = launch_line.Plan(setting.case.model, parallel, setting.m, setting.case.b)
    full = plan.recompute.granularity == "full"
    others = CORPUS | {
        "recompute_method": plan.recompute.method if full else default.recompute_method,
        "recompute_num_layers": plan.recompute.num_layers if full else default.recompute_num_layers,
        "ddp_bucket_size": plan.bucket_size if plan.zero_stage < 3 else default.ddp_bucket_size,     # 3: block by block
        "pipeline_schedule": default.pipeline_schedule if plan.p == 1 or plan.chunks else plan.schedule,
        "keep_gathered_inputs": setting.case.keep_gathered_inputs, "cpu_offload": plan.cpu_offload,
        "no_scatter_gather_tensors_in_pipeline": not plan.scatter_gather}
    return [*launch_line.model_options(shown, None), *launch_line.plan_options(shown, None), *launch_line.arguments(
        {name: value for name, value in others.items() if value != getattr(default, name)})]


def grade(student: str, file: str, line: int, kind: str) -> Marks:
    """Compare an answer with the student's bug. The file is given by its path in the repository, as `mpi_impl/...`."""
    entry = hunt_of(student).entry
    right = Path(file) == Path(entry.bug.file)
    return Marks(right, right and line in lines_of(entry), kind == entry.kind)


def lines_of(entry: Entry) -> range:
    """Return the numbers of the lines that the bug changes."""
    before, _, _ = source_of(entry.bug.module).partition(entry.bug.right)
    first = before.count("\n") + 1
    return range(first, first + entry.bug.right.rstrip("\n").count("\n") + 1)


def main(argv: Sequence[str]) -> None:
    """Describe a student's run; or run a program on this rank, with the student's bug planted in it."""
    if not argv:
        sys.exit(__doc__)
    hunt = hunt_of(argv[0])
    if len(argv) == 1:
        print(f"{hunt.ranks} ranks; pretrain_gpt {' '.join(hunt.options)}")
        return
    sys.argv = list(argv[1:])
    with planted(*hunt.entry.bug):
        runpy.run_module(module_of(argv[1]), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
