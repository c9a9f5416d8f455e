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
from grading.answers import CURRENT, answers_of
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
    checks.close()      # each submission has ranks of its own
    try:
        with secret_draws(seed, CURRENT) as draws:
            return marks(source, draws)
    finally:
        checks.close()
        CURRENT.clear()


def no_marks(source, said: str) -> list[Mark]:
    """Return zero points and this message for all checks, without running them."""
    cells = [(cell, cell.metadata.get("nbgrader", {})) for cell in source.cells if cell.cell_type == "code"]
    return [Mark(about["grade_id"], title(cell.source), 0.0, float(about["points"]), said)
            for cell, about in cells if about.get("grade")]


def marks(source, draws: Draws) -> list[Mark]:
    """Run the locked cells of a notebook from top to bottom. Return the marks of those with points, the checks."""
    names: dict = {"__name__": "checks"}
    found = []
    for cell in source.cells:
        about = cell.metadata.get("nbgrader", {})
        if cell.cell_type != "code" or not about.get("locked") or about.get("solution"):
            continue
        code = "\n".join("" if line.startswith("%") else line for line in cell.source.splitlines())
        draws.begin(about["grade_id"])
        if not about.get("grade"):
            exec(compile(code, about["grade_id"], "exec"), names)
            continue
        right, said = run_check(code, about["grade_id"], names)
        points = float(about["points"])
        found.append(Mark(about["grade_id"], title(cell.source), points if right else 0.0, points, said))
    return found


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
