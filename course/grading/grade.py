"""Grade a submission: the instructor's checks on the student's answers.

The checks of the instructor's notebook run in this process, the answers of the submission on limited ranks, and the
rest of the submission is ignored. So no student's code can read a check or run in its process. The checks draw their
random numbers from a secret seed (`course/grading/draws.py`).
"""
import contextlib
import io
import traceback
from contextlib import nullcontext
from typing import NamedTuple

from course.grading import checks
from course.grading.answers import CURRENT, about, answers_of
from course.grading.draws import PUBLIC, Draws, new_seed, secret_draws


class Mark(NamedTuple):
    """The result of one check."""

    check: str       # its grade_id
    title: str       # its first line
    points: float
    of: float
    said: str        # the message for the author of the answer


def grade(source, submitted, seed: str | None = None) -> list[Mark]:
    """Return the marks of a submitted notebook, in the order of the checks in the instructor's notebook `source`.

    The checks draw their random numbers from `seed` (default: a new one, which is printed); with PUBLIC, those of a
    notebook.
    """
    if seed is None:
        seed = new_seed()
        print(f"No seed was given: the checks draw their random numbers from a new one, {seed}")
    CURRENT.clear()
    CURRENT.update({name: "" for name in answers_of(source)} | answers_of(submitted))
    try:
        with nullcontext(Draws(PUBLIC, CURRENT)) if seed == PUBLIC else secret_draws(seed, CURRENT) as draws:
            return marks(source, draws)
    finally:
        CURRENT.clear()


def no_marks(source, said: str) -> list[Mark]:
    """Return zero points and this message for all checks, without running them."""
    return [Mark(about(cell)["grade_id"], title(cell.source), 0.0, float(about(cell)["points"]), said)
            for cell in source.cells if cell.cell_type == "code" and about(cell).get("grade")]


def marks(source, draws: Draws) -> list[Mark]:
    """Run the locked cells of a notebook from top to bottom. Return the marks of those with points, the checks."""
    names: dict = {"__name__": "checks"}
    found, answers = [], answers_of(source)
    earlier: list[str] = []     # tasks before those to which the next check belongs, which are its own
    own: list[str] = []
    checked = False
    for cell in source.cells:
        name = about(cell).get("grade_id")
        if cell.cell_type != "code" or not name:
            continue
        if about(cell).get("solution"):
            if checked:
                earlier, own, checked = earlier + own, [], False
            own.append(name)
        elif about(cell).get("grade"):
            checked, also = True, cell.metadata.get("shardlab", {}).get("also")
            given = {task: answers[task] for task in earlier if task != also}
            found.append(mark_of(cell, names, draws, given, set(answers) - {*earlier, *own}))
        else:
            draws.begin(name)
            exec(compile(code_of(cell.source), name, "exec"), names)
    return found


def mark_of(cell, names: dict, draws: Draws, given: dict[str, str], later: set[str]) -> Mark:
    """Return the mark of a check.

    An answer that fails is checked once more by itself, with the course's own answers to earlier tasks, which are
    `given`, and without later ones: a mistake in another task is no mistake here. The message is always that of the
    first time, since an answer could print what it finds of the course's own in the second.
    """
    name, points = about(cell)["grade_id"], float(about(cell)["points"])
    draws.begin(name)
    right, said = run_check(code_of(cell.source), name, names)
    if not right and (given or later):
        draws.begin(f"{name}, by itself")
        with checks.alone(given, later):
            right, _ = run_check(code_of(cell.source), name, names)
        if right:
            said = f"passed with right answers to the earlier tasks. With your own it fails:\n{said}"
    return Mark(name, title(cell.source), points if right else 0.0, points, said)


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
        shortened = checks.CheckFailed(f"The value that the answer returned could not be checked ({last}). "
                                       "Is it of the kind that the task asks for?")
        return False, f"{printed.getvalue()}{shortened}"
    return True, printed.getvalue()


def title(source: str) -> str:
    """Return the comment in the first line of a check."""
    return source.partition("\n")[0].lstrip("# ")
