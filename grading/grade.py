"""Grade a submission: the instructor's checks on the student's answers.

The checks of the instructor's notebook run in this process, the answers of the submission on limited ranks, and the
rest of the submission is ignored. So no student's code can read a check or run in its process. The checks draw their
random numbers from a secret seed (`grading/draws.py`).
"""
import contextlib
import io
import traceback
from typing import NamedTuple

from grading import checks
from grading.answers import CURRENT, answers_of, source_of
from grading.draws import Draws, new_seed, secret_draws


class Mark(NamedTuple):
    """The result of one check."""

    check: str       # its grade_id
    title: str       # its first line
    points: float
    of: float
    said: str        # the message for the author of the answer


def grade(source, submitted, seed: str | None = None) -> list[Mark]:
    """Return the marks of a submitted notebook, in the order of the checks in the instructor's notebook `source`.

    The checks draw their random numbers from `seed` (default: a new one, which is printed).
    """
    if seed is None:
        seed = new_seed()
        print(f"No seed was given: the checks draw their random numbers from a new one, {seed}")
    CURRENT.clear()
    CURRENT.update({name: "" for name in answers_of(source)} | answers_of(submitted))
    try:
        with secret_draws(seed, CURRENT) as draws:
            return marks(source, draws)
    finally:
        CURRENT.clear()


def no_marks(source, said: str) -> list[Mark]:
    """Return zero points and this message for all checks, without running them."""
    cells = [(cell, cell.metadata.get("nbgrader", {})) for cell in source.cells if cell.cell_type == "code"]
    return [Mark(about["grade_id"], title(cell.source), 0.0, float(about["points"]), said)
            for cell, about in cells if about.get("grade")]


def marks(source, draws: Draws) -> list[Mark]:
    """Run the locked cells of a notebook from top to bottom. Return the marks of those with points, the checks."""
    names: dict = {"__name__": "checks"}
    found, tasks = [], Tasks()
    for cell in source.cells:
        about = cell.metadata.get("nbgrader", {})
        if cell.cell_type != "code" or not about:
            continue
        if about.get("solution"):
            tasks.add(about["grade_id"], source_of(cell.source))
        elif about.get("grade"):
            found.append(mark_of(cell.source, about, names, draws, tasks.before_check()))
        else:
            draws.begin(about["grade_id"])
            exec(compile(code_of(cell.source), about["grade_id"], "exec"), names)
    return found


class Tasks:
    """The tasks in a notebook down to a check: its own, which are those behind the check before it, and earlier ones.
    """

    def __init__(self) -> None:
        self.earlier: dict[str, str] = {}       # the course's own answers, by name
        self.own: dict[str, str] = {}
        self.checked = False

    def add(self, name: str, answer: str) -> None:
        """Come to a task. `answer` is the course's own."""
        if self.checked:
            self.earlier |= self.own
            self.own, self.checked = {}, False
        self.own[name] = answer

    def before_check(self) -> dict[str, str]:
        """Come to a check. Return the course's own answers to the earlier tasks."""
        self.checked = True
        return dict(self.earlier)


def mark_of(source: str, about: dict, names: dict, draws: Draws, earlier: dict[str, str]) -> Mark:
    """Return the mark of a check.

    An answer that fails is checked once more, with the course's own answers to earlier tasks: a mistake there is no
    mistake here. The message is always that of the first time, since an answer could print what it finds in the second.
    """
    name, points = about["grade_id"], float(about["points"])
    draws.begin(name)
    right, said = run_check(code_of(source), name, names)
    if not right and earlier:
        draws.begin(f"{name}, with earlier answers")
        checks.GIVEN.update(earlier)
        try:
            right, _ = run_check(code_of(source), name, names)
        finally:
            checks.GIVEN.clear()
        if right:
            said = f"passed with right answers to the earlier tasks. With your own it fails:\n{said}"
    return Mark(name, title(source), points if right else 0.0, points, said)


def code_of(source: str) -> str:
    """Return a cell's code without magics, with the same lines."""
    return "\n".join("" if line.startswith("%") else line for line in source.splitlines())


def run_check(code: str, name: str, names: dict) -> tuple[bool, str]:
    """Run one check. Return whether it passed, and its message."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), names)
    except checks.CheckFailed as failed:
        return False, f"{printed.getvalue()}{failed}"
    except Exception as error:      # the answer returned a value that the check did not expect
        last = "".join(traceback.format_exception_only(error)).strip()
        return False, (f"{printed.getvalue()}The value that the answer returned could not be checked ({last}). "
                       "Is it of the kind that the task asks for?")
    return True, printed.getvalue()


def title(source: str) -> str:
    """Return the comment in the first line of a check."""
    return source.partition("\n")[0].lstrip("# ")
