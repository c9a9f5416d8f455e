"""The bugs that lab 7 lets each student find: others for each, in a file that only the instructor has.

`python -m course.hunts` draws them and writes the file `hunts.json` of a course, and a page for each student with what
the bugs have left behind in a run.
"""
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from course.grading.checks import CheckFailed, expect
from course.grading.draws import GRADED, pushed
from mpi_impl.runtime.files import is_there, read_text
from reference.errors import UserError

FILE = "hunts.json"             # in the folder of a course
LEVELS = ("forward", "backward", "step")
KINDS = ("missing communication", "extra communication", "wrong group", "scaling", "computation", "scheduling",
         "aliasing", "state and checkpoint", "random numbers", "memory")
PATH = re.compile(r"(mpi_impl|reference)(/\w+)+\.py")


class Culprit(NamedTuple):
    """The place and the kind of a bug."""

    file: str
    first: int      # the first and the last line that count
    last: int
    kind: str


HUNTED: list[Mapping[str, Culprit]] = []        # of the student who is graded; empty in a notebook


def hunted_by(names: Iterable[str], path: Path) -> AbstractContextManager:
    """Let checks compare with the bugs of the student who has one of these names in a course's file."""
    known = read(path)
    return pushed(HUNTED, next((known[name] for name in names if name in known), {}))


def read(path: Path) -> dict[str, dict[str, Culprit]]:
    """Return the bugs by student and level; nobody's if there is no file. Raises UserError."""
    return read_entries(path, lambda cases: {level: Culprit(*(case[name] for name in Culprit._fields))
                                             for level, case in cases.items()}, "course.hunts")


def read_entries(path: Path, parse: Callable[[Any], Any], program: str) -> dict[str, Any]:
    """Return what a file of this program has by name, parsed; nothing if there is no file. Raises UserError."""
    if not is_there(str(path)):
        return {}
    text = read_text(str(path))
    try:
        return {name: parse(entry) for name, entry in json.loads(text).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a file of hunts: restore it, or move it away and give python -m {program}, "
                        "which draws the same bugs again.") from error


def culprit(level: str) -> Culprit | None:
    """Return the bug to find, or None in a notebook. Raises CheckFailed for a student without one."""
    if not GRADED:
        return None
    if not HUNTED or level not in HUNTED[-1]:
        raise CheckFailed("There is no case for you in this course's file of hunts: tell your instructor.")
    return HUNTED[-1][level]


def expect_file(level: str, file: str) -> None:
    """Check the file of a case. Raises CheckFailed."""
    bug = culprit(level)
    expect(bug is None or file == bug.file, f"The bug of the {level} case is not in {file}.",
           "what computes the first wrong tensor from the last right one?")


def expect_line(level: str, file: str, line: int) -> None:
    """Check the line of a case. Raises CheckFailed."""
    bug = culprit(level)
    expect(bug is None or file == bug.file and bug.first <= line <= bug.last, f"Line {line} of {file} is as it was.",
           "plant your hypothesis in a copy: does its run print the same losses?")


def expect_kind(level: str, file: str, line: int, kind: str) -> None:
    """Check the kind of a case's bug, which is worth nothing without its line. Raises CheckFailed."""
    expect_line(level, file, line)
    bug = culprit(level)
    expect(bug is None or kind == bug.kind,
           f"Line {line} of {file} has no bug of the kind '{kind}' in the {level} case.",
           "what would a reviewer say in two words?")
