"""Training runs of other programs: a recorder for PyTorch, which they import, and the comparison of what it records, of
their checkpoints, and of their frameworks' dumps.
"""
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mpi_impl.runtime.files import check_writable, write_whole
from reference.errors import UserError
from shardlab.compare.completeness import format_iterations
from shardlab.compare.report import agreement, first, table
from shardlab.compare.their_runs import checkpoints, records, sglang
from shardlab.compare.their_runs.differences import Comparison
from shardlab.compare.their_runs.frameworks import in_common_names
from shardlab.compare.their_runs.ours import is_ours, read_ours
from shardlab.compare.their_runs.page import page
from shardlab.compare.their_runs.records import TheirRun

RECORDER = Path(__file__).with_name("shardlab_recorder.py")

# What is said first where the runs are not the same run from the start.
NOT_THE_SAME = {"batch": "A and B were given different batches, so nothing else is expected to be equal: give both the "
                         "same samples in each step. A rank's share is taken for a contiguous part of the global "
                         "batch: give rank r batch.chunk(ranks)[r], not every ranks-th sample.",
                "parameters": "A and B begin with different weights, so nothing else is expected to be equal: let both "
                              "load one checkpoint, or draw them before the model is divided."}

READERS = ((records.is_recording, records.read), (sglang.is_dump, sglang.read))     # of other programs' runs


class RecordingKind(NamedTuple):
    """A kind of recording: how to call it, how to recognize one, and how to compare two."""

    name: str
    is_one: Callable[[str], bool]
    compare: Callable[[str, str], tuple[str, bool]]


def are_recordings(a: str, b: str) -> bool:
    """Report whether these are two recordings of other programs, or one of such a run and one of our own.

    Raises UserError if only one is, or for two kinds.
    """
    kinds = [kind_of(path) for path in (a, b)]
    if kinds[0] is kinds[1]:
        return kinds[0] is not None
    if RUN in kinds and is_ours((a, b)[kinds.index(RUN) - 1]):
        return True
    what = [f"{path} is {kind.name if kind else unknown(path)}" for path, kind in zip((a, b), kinds)]
    raise UserError(f"{what[0]}, and {what[1]}: both must be of one kind.")


def unknown(path: str) -> str:
    """Describe what is of no kind."""
    if path.startswith("-"):
        return "a run's options"
    if not os.path.exists(path):
        return "not there"
    if is_ours(path):
        return "a recording of pretrain_gpt"
    if os.path.isdir(path):
        return "a folder without a recording or a checkpoint" if os.listdir(path) else "an empty folder"
    return "a file of an unknown kind"


def compared(a: str, b: str, report: str | None = None) -> tuple[str, bool]:
    """Compare two recordings: what is to be said, and whether they differ. Write a page if `report` names a file.

    Raises UserError.
    """
    kind = kind_of(a) or kind_of(b)
    assert kind is not None, "the caller has asked are_recordings"
    if report is None:
        return kind.compare(a, b)
    if kind is not RUN:
        raise UserError(f"--report shows recordings of runs side by side, and {a} is {kind.name}. Leave it out.")
    check_writable(report)
    comparison = Comparison(*in_common_names(read_run(a), read_run(b)), (a, b))
    said = describe(comparison)
    write_whole(report, page(comparison, said[0]))
    return said


def kind_of(path: str) -> RecordingKind | None:
    return next((kind for kind in KINDS if kind.is_one(path)), None)


# ---- runs -----------------------------------------------------------------------------------------------------------


def is_run(folder: str) -> bool:
    return any(is_one(folder) for is_one, _ in READERS)


def read_run(folder: str) -> TheirRun:
    """Read a recording of what steps compute, of another program or of our own. Raises UserError."""
    for is_one, read in (*READERS, (is_ours, read_ours)):
        if is_one(folder):
            return read(folder)
    raise UserError(f"{folder} is not a recording: shardlab_recorder.py writes a folder with a list for each rank.")


def compare_runs(a: str, b: str) -> tuple[str, bool]:
    """Compare two recordings of what steps compute. Raises UserError."""
    return describe(Comparison(*in_common_names(read_run(a), read_run(b))))


def describe(comparison: Comparison) -> tuple[str, bool]:
    """Compare the two runs: what is to be said, and whether they differ. Raises UserError."""
    found, runs = comparison.findings(), " and ".join(comparison.names)
    alone = f"; {found.alone:,} more are in one alone" if found.alone else ""
    if not found.differences:
        formats = " and ".join(comparison.formats) or "whole numbers"
        inside = "" if comparison.unseen in ("float64", *comparison.formats) else f" with {comparison.unseen} inside"
        return agreement(found, format_iterations(comparison.steps, "step"), formats + inside + alone, runs), False
    one, pattern = found.differences[0].key, comparison.pattern(found.differences[0])
    notes = [NOT_THE_SAME[one.phase]] if one.iteration == comparison.a.first_step and one.phase in NOT_THE_SAME else []
    if weights := comparison.weights_alone():
        notes.append(f"Weights that only one of the two has: {weights}.")
    lines = [*first(found, runs), *[f"  pattern    {pattern}"] * bool(pattern), "", *table(found.differences)]
    return "\n\n".join([*notes, "\n".join(lines)]), True


RUN = RecordingKind("a recording of another program", is_run, compare_runs)
KINDS = RUN, RecordingKind("a checkpoint", checkpoints.is_checkpoint, checkpoints.compared)
