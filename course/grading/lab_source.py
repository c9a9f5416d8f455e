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

LABS = Path(__file__).parents[1] / "labs"
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
        said = cell.metadata
        cell.metadata = nbformat.from_dict(nbgrader_metadata(cell.cell_type, said, i))
        if "also" in said:
            cell.metadata["shardlab"] = {"also": said["also"]}
    return notebook


def nbgrader_metadata(cell_type: str, said: dict, i: int) -> dict:
    """Return nbgrader's metadata for a cell; `said` is from its first line. Texts are locked, so tasks stay as set."""
    if "writing" in said:
        about = {"grade_id": said["writing"], "grade": True, "solution": True, "locked": False,
                 "points": said["points"]}
    elif cell_type != "code":
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
