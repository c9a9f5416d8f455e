"""A lab as its author writes it, `notebooks/labs/*.py`, converted to nbgrader's notebook.

A source is a jupytext percent script. What a code cell is stands in its first line:

    # %% answer="ring_all_reduce"            the student's: what is between BEGIN SOLUTION and END SOLUTION is cut
    # %% check="check_all_reduce" points=10  a check: what is between BEGIN HIDDEN TESTS and END HIDDEN TESTS is cut
    # %% locked="tools"                      the instructor's, without points: what checks need
    # %%                                     for the student to play with; nobody grades or restores it
"""
from pathlib import Path

import jupytext
import nbformat

LABS = Path(__file__).parents[1] / "notebooks" / "labs"
METADATA = {"language_info": {"name": "python"},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def labs() -> list[Path]:
    """Return the sources of all labs, in order."""
    return sorted(LABS.glob("lab*.py"))


def notebook_of(source: Path):
    """Return the instructor's notebook, with solutions and hidden tests."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata = nbformat.from_dict(nbgrader_metadata(cell.cell_type, cell.metadata, i))
    return notebook


def nbgrader_metadata(cell_type: str, said: dict, i: int) -> dict:
    """Return nbgrader's metadata for a kind of cell. Texts are locked, so that a task stays as it was set."""
    if cell_type != "code":
        about = {"grade_id": f"text_{i}", "grade": False, "solution": False, "locked": True}
    elif "answer" in said:
        about = {"grade_id": said["answer"], "grade": False, "solution": True, "locked": False}
    elif "check" in said:
        about = {"grade_id": said["check"], "grade": True, "solution": False, "locked": True, "points": said["points"]}
    elif "locked" in said:
        about = {"grade_id": said["locked"], "grade": False, "solution": False, "locked": True}
    else:
        return {}
    return {"nbgrader": {**about, "schema_version": 3, "task": False}}
