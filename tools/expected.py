"""The right results of whole layers that students get: `python -m tools.expected` writes notebooks/labs/expected/.

A lab whose functions `whole_...` stand in a hidden region gives students their results alone (`grading/stored.py`).
"""
import re
from copy import deepcopy
from pathlib import Path

from grading.answers import CURRENT, answers_of
from grading.checks import close
from grading.draws import Draws
from grading.grade import marks
from grading.lab_source import labs, notebook_of
from grading.stored import FOLDER, key_of
from grading.values import to_bytes

HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n(.*?)### END HIDDEN TESTS", re.DOTALL)
WHOLE = re.compile(r"^def (whole_\w+)", re.MULTILINE)
RESULTS: dict = {}      # of the lab that is being run


def record(function: str, compute):
    """Return a function that also notes its results."""
    def noted(*args):
        return RESULTS.setdefault(key_of(function, args), compute(*args))
    return noted


def expected(lab: Path) -> bytes:
    """Run what students see of a lab, with its solution. Return the results of hidden functions that it asks for."""
    notebook = deepcopy(notebook_of(lab))
    RESULTS.clear()
    CURRENT.clear()
    CURRENT.update(answers_of(notebook))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            whole = "".join(region for region in HIDDEN.findall(cell.source) if WHOLE.search(region))
            noted = "".join(f"{name} = record({name!r}, {name})\n" for name in WHOLE.findall(whole))
            cell.source = f"from tools.expected import record\n{whole}{noted}{HIDDEN.sub('', cell.source)}"
            cell.metadata.setdefault("nbgrader", {"grade_id": "play"})
    for mark in marks(notebook, Draws("", {})):
        assert mark.points == mark.of, mark
    return to_bytes(RESULTS)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for lab in labs():
        if "stored(" in lab.read_text():
            (FOLDER / f"{lab.stem}.bin").write_bytes(expected(lab))
            print(f"{lab.stem}: {len(RESULTS)} results")
    close()


if __name__ == "__main__":
    from tools import expected as program  # whose RESULTS are those of `record` in a lab

    program.main()
