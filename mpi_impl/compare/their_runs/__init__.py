"""Training runs of other programs: a recorder for PyTorch, which they import, and the comparison of what it records."""
from pathlib import Path

from mpi_impl.compare.completeness import format_iterations
from mpi_impl.compare.report import agreement, first, table
from mpi_impl.compare.their_runs import sglang
from mpi_impl.compare.their_runs.differences import Comparison
from mpi_impl.compare.their_runs.frameworks import in_common_names
from mpi_impl.compare.their_runs.ours import is_ours, read_ours
from mpi_impl.compare.their_runs.records import TheirRun, is_recording, read
from reference.errors import UserError

RECORDER = Path(__file__).with_name("shardlab_recorder.py")

# What is said first where the runs are not the same run from the start.
NOT_THE_SAME = {"batch": "A and B were given different batches, so nothing else is expected to be equal: give both the "
                         "same samples in each step, the global batch divided among the ranks of dp.",
                "parameters": "A and B begin with different weights, so nothing else is expected to be equal: let both "
                              "load one checkpoint, or draw them before the model is divided."}

READERS = ((is_recording, read), (sglang.is_dump, sglang.read))        # of other programs' recordings


def are_recordings(a: str, b: str) -> bool:
    """Report whether one of these is a recording of another program. Raises UserError if the other is none at all."""
    found = [any(is_one(folder) for is_one, _ in READERS) for folder in (a, b)]
    if any(found) and not all(found):
        theirs, other = (a, b) if found[0] else (b, a)
        if not is_ours(other):
            raise UserError(f"{theirs} is a recording of another program, and {other} is none, nor one of "
                            "`pretrain_gpt --record`: both must be recordings.")
    return any(found)


def read_any(folder: str) -> TheirRun:
    """Read a recording of any kind. Raises UserError."""
    for is_one, read_it in (*READERS, (is_ours, read_ours)):
        if is_one(folder):
            return read_it(folder)
    raise UserError(f"{folder} is not a recording: shardlab_recorder.py writes a folder with a list for each rank.")


def compared(a: str, b: str) -> tuple[str, bool]:
    """Compare two recordings: what is to be said, and whether they differ. Raises UserError."""
    return describe(Comparison(*in_common_names(read_any(a), read_any(b))))


def describe(comparison: Comparison) -> tuple[str, bool]:
    """Compare the two runs: what is to be said, and whether they differ. Raises UserError."""
    found, runs = comparison.findings(), " and ".join(comparison.names)
    alone = f"; {found.alone:,} more are in one alone" if found.alone else ""
    if not found.differences:
        return agreement(found, format_iterations(sorted({key.iteration for key in comparison.a.parts})),
                         f"{comparison.format}{alone}", runs), False
    one = found.differences[0].key
    note = NOT_THE_SAME.get(one.phase) if one.iteration == comparison.a.first_step else None
    return "\n".join([*([note, ""] if note else []), *first(found, runs), "", *table(found.differences)]), True
