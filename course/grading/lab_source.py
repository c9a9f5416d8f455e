"""A lab as its author writes it, `course/labs/*.py`, converted to nbgrader's notebook.

A source is a jupytext percent script. The first line of a code cell says what it is:

    # %% answer="ring_all_reduce"            a task; BEGIN SOLUTION to END SOLUTION is removed for students
    # %% check="check_all_reduce" points=10  a check; BEGIN HIDDEN TESTS to END HIDDEN TESTS is removed for students
       ... also="reduce_scatter"           if it checks this earlier task, too
    # %% locked="tools"                      the instructor's code that checks need, without points
    # %% [markdown] writing="why_a_ring" points=5     an answer in words to the text above it, which a person grades
    # %%                                     a cell for students to play with; it is not graded
"""
from pathlib import Path

import jupytext
import nbformat

from course.grading.variants import PUBLIC, source_of

LABS = Path(__file__).parents[1] / "labs"
METADATA = {"language_info": {"name": "python"},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}

# What the first line of a cell can say: whether the cell is graded, and whether students write it.
KINDS = {"writing": (True, True), "answer": (False, True), "check": (True, False), "locked": (False, False)}


def labs() -> list[Path]:
    """Return the sources of all labs, in order."""
    return sorted(LABS.glob("lab*.py"))


def notebook_of(source: Path, variant: str = PUBLIC):
    """Return the instructor's notebook of a variant, with solutions and hidden tests."""
    notebook = jupytext.reads(source_of(source, variant), fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        said = cell.metadata
        cell.metadata = nbformat.from_dict(nbgrader_metadata(cell.cell_type, said, i))
        if "also" in said:
            cell.metadata["shardlab"] = {"also": said["also"]}
    return notebook


def nbgrader_metadata(cell_type: str, said: dict, i: int) -> dict:
    """Return nbgrader's metadata for a cell; `said` is from its first line. Texts are locked, so tasks stay as set."""
    kind = next((kind for kind in KINDS if kind in said), None)
    if kind is None and cell_type == "code":
        return {}
    grade, solution = KINDS[kind] if kind else (False, False)
    about = {"grade_id": said[kind] if kind else f"text_{i}", "grade": grade, "solution": solution,
             "locked": not solution, "schema_version": 3, "task": False}
    return {"nbgrader": about | ({"points": said["points"]} if grade else {})}
