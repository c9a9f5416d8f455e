"""Grade a submission: the instructor's checks on the student's answers.

The checks of the instructor's notebook run in this process, the answers of the submission on limited ranks, and the
rest of the submission is ignored. So no student's code can read a check or run in its process. The checks draw their
random numbers from a secret seed (`course/grading/draws.py`).
"""
import contextlib
import io
import traceback
from collections.abc import Iterator
from typing import NamedTuple

from course.grading import checks
from course.grading.answers import CURRENT, answers_of
from course.grading.draws import Draws, new_seed, secret_draws


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
    found, tasks = [], Tasks(answers_of(source))
    for cell in source.cells:
        about = cell.metadata.get("nbgrader", {})
        if cell.cell_type != "code" or not about:
            continue
        if about.get("solution"):
            tasks.add(about["grade_id"])
        elif about.get("grade"):
            tasks.check(cell.metadata.get("shardlab", {}).get("also"))
            found.append(mark_of(cell.source, about, names, draws, tasks))
        else:
            draws.begin(about["grade_id"])
            exec(compile(code_of(cell.source), about["grade_id"], "exec"), names)
    return found


class Tasks:
    """The tasks in a notebook, seen from a check: its own, which are those since the check before it, earlier and later
    ones.
    """

    def __init__(self, answers: dict[str, str]):
        """Begin at the top of the notebook with these answers, the course's own."""
        self.answers = answers
        self.earlier: list[str] = []
        self.own: list[str] = []
        self.checked = False
        self.also: str | None = None

    def add(self, name: str) -> None:
        """Come to a task."""
        if self.checked:
            self.earlier += self.own
            self.own, self.checked = [], False
        self.own.append(name)

    def check(self, also: str | None) -> None:
        """Come to a check, of the own tasks and perhaps of an earlier one: what a forward keeps for its backward."""
        self.checked, self.also = True, also

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let the answers to the own tasks be checked with the course's own to earlier ones, and without later ones."""
        checks.GIVEN.update({name: self.answers[name] for name in self.earlier if name != self.also})
        checks.LATER.update(set(self.answers) - {*self.earlier, *self.own})
        try:
            yield
        finally:
            checks.GIVEN.clear()
            checks.LATER.clear()


def mark_of(source: str, about: dict, names: dict, draws: Draws, tasks: Tasks) -> Mark:
    """Return the mark of a check.

    An answer that fails is checked once more by itself: a mistake in another task is no mistake here. The message is
    always that of the first time, since an answer could print what it finds of the course's own in the second.
    """
    name, points = about["grade_id"], float(about["points"])
    draws.begin(name)
    right, said = run_check(code_of(source), name, names)
    if not right and len(tasks.answers) > len(tasks.own):
        draws.begin(f"{name}, by itself")
        with tasks.alone():
            right, _ = run_check(code_of(source), name, names)
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
