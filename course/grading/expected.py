"""The right results of whole layers that students get: `python -m course.grading.expected` stores them for all labs.

A lab whose functions `whole_...` stand in a hidden region gives students their results alone, in course/labs/expected/
(`course/grading/stored.py`).
"""
import re
from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path

from course.grading import checks
from course.grading.answers import CURRENT, answers_of
from course.grading.draws import Draws
from course.grading.grade import marks
from course.grading.lab_source import labs, notebook_of
from course.grading.stored import FOLDER, key_of
from course.grading.values import to_bytes
from course.grading.variants import PUBLIC

HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n(.*?)### END HIDDEN TESTS", re.DOTALL)
WHOLE = re.compile(r"^def (whole_\w+)", re.MULTILINE)
RESULTS: dict = {}      # of the lab that is being run
PATIENCE = 120.0        # seconds for a run of a solution, on a busy machine: limits are for answers


def record(function: str, compute):
    """Return a function that also notes its results."""
    def noted(*args):
        return RESULTS.setdefault(key_of(function, args), compute(*args))
    return noted


def expected(lab: Path, variant: str = PUBLIC) -> bytes:
    """Run what students see of a lab, with its solution. Return the results of hidden functions that it asks for."""
    notebook = deepcopy(notebook_of(lab, variant))
    RESULTS.clear()
    CURRENT.clear()
    CURRENT.update(answers_of(notebook))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            whole = "".join(region for region in HIDDEN.findall(cell.source) if WHOLE.search(region))
            noted = "".join(f"{name} = record({name!r}, {name})\n" for name in WHOLE.findall(whole))
            cell.source = f"from course.grading.expected import record\n{whole}{noted}{HIDDEN.sub('', cell.source)}"
            cell.metadata.setdefault("nbgrader", {"grade_id": "play"})
    limit, checks.LIMIT = checks.LIMIT, PATIENCE
    try:
        with redirect_stdout(StringIO()):       # of the cells to play with
            found = marks(notebook, Draws("", {}))
    finally:
        checks.LIMIT = limit
    for mark in found:
        assert mark.points == mark.of, mark
    return to_bytes(RESULTS)


def has_results(lab: Path) -> bool:
    """Report whether students of a lab get stored results."""
    return "stored(" in lab.read_text()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for lab in labs():
        if has_results(lab):
            (FOLDER / f"{lab.stem}.bin").write_bytes(expected(lab))
            print(f"{lab.stem}: {len(RESULTS)} results")
    checks.close()


if __name__ == "__main__":
    from course.grading import expected as program  # whose RESULTS are those of `record` in a lab

    program.main()
