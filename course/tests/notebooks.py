"""Small notebooks of an instructor, for tests: one line each for an answer and for a check."""
import nbformat

from course.grading.lab_source import METADATA


def cell(kind: str, name: str, source: str, **about):
    found = nbformat.v4.new_code_cell(source.lstrip("\n"))
    found.id = name
    found.metadata["nbgrader"] = {"grade_id": name, "grade": kind == "check", "solution": kind == "answer",
                                  "locked": kind != "answer", "schema_version": 3, "task": False, **about}
    return found


def answer_cell(name: str, source: str):
    return cell("answer", name, f"%%answer {name}\n{source}")


def check_cell(name: str, source: str, points: float = 5):
    return cell("check", name, source, points=points)


def notebook(*cells):
    return nbformat.v4.new_notebook(cells=list(cells), metadata=METADATA)
