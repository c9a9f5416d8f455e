"""Submissions, which may contain anything: they are read without trust, and oddities are reported in sentences."""
import json
from pathlib import Path
from typing import NamedTuple

import nbformat

from grading.answers import answers_of, name_of
from grading.grade import Mark, grade, no_marks
from grading.writing import texts_of

LARGEST = 50 << 20      # bytes of a notebook


class Unreadable(Exception):
    """A submission that is not a notebook. The message is for its author."""


class Graded(NamedTuple):
    """The result of grading a submission."""

    marks: list[Mark]
    remarks: list[str]      # sentences about the submission as a whole

    @property
    def points(self) -> float:
        return sum(mark.points for mark in self.marks)

    @property
    def of(self) -> float:
        return sum(mark.of for mark in self.marks)


def grade_file(source, path: Path, name: str = "", seed: str | None = None) -> Graded:
    """Grade a notebook, or the one of this name in a folder, with the checks of the instructor's notebook `source`.

    `seed` is the seed of the checks' random numbers.
    """
    try:
        submitted = read(find_notebook(path, name) if path.is_dir() else path)
    except Unreadable as problem:
        return Graded(no_marks(source, str(problem)), [str(problem)])
    said = remarks(source, submitted)
    if not set(answers_of(source)) & set(answers_of(submitted)):
        return Graded(no_marks(source, said[0]), said)
    return Graded(grade(source, submitted, seed), said)


def find_notebook(folder: Path, name: str) -> Path:
    """Return the path of the notebook of this name in a folder, else of the only one. Raises Unreadable."""
    if (folder / name).is_file():
        return folder / name
    others = [path for path in sorted(folder.glob("*.ipynb")) if path.is_file()]
    if len(others) == 1:
        return others[0]
    if not others:
        raise Unreadable(f"There is no notebook: {name} was expected.")
    raise Unreadable(f"There are {len(others)} notebooks, and none of them is called {name}: submit that one.")


def read(path: Path):
    """Read the cells of a notebook: kind, text, and nbgrader's metadata. Raises Unreadable."""
    try:
        if path.stat().st_size > LARGEST:
            raise Unreadable(f"{path.name} is larger than {LARGEST >> 20} MB: clear its outputs, and submit it again.")
        notebook = json.loads(path.read_text(encoding="utf-8-sig"))
        return nbformat.from_dict({"cells": [cell_of(cell) for cell in cells_of(notebook)]})
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        empty = not path.read_bytes().strip()
        raise Unreadable(f"{path.name} is {'empty' if empty else 'not a notebook: it is not JSON'}. Open it in "
                         "Jupyter, save it, and submit it again.") from None
    except (KeyError, TypeError, AttributeError):
        raise Unreadable(f"{path.name} is not a notebook: it is JSON, but has no cells. Open it in Jupyter, save it, "
                         "and submit it again.") from None


def cells_of(notebook: dict) -> list:
    """Return the cells of a notebook of any version of the format."""
    return notebook["cells"] if "cells" in notebook else notebook["worksheets"][0]["cells"]      # before 2015


def cell_of(cell: dict) -> dict:
    """Return the fields of a cell that grading needs, converted to their proper types."""
    text = cell.get("source", cell.get("input", ""))
    text = "".join(text) if isinstance(text, list) else str(text)
    metadata = cell.get("metadata", {})
    about = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    about = about if isinstance(about, dict) and isinstance(about.get("grade_id"), str) else {}
    return {"cell_type": str(cell["cell_type"]), "source": text.encode(errors="replace").decode(),
            "metadata": {"nbgrader": about} if about else {}}


def remarks(source, submitted) -> list[str]:
    """Return sentences about answers that are missing, duplicated or unknown, and texts that are not written."""
    tasks, given = list(answers_of(source)), [name for cell in submitted.cells if (name := name_of(cell))]
    if not set(tasks) & set(given):
        return [f"It contains none of the answers of this lab ({', '.join(tasks)}): is it the notebook of another lab?"]
    said = [f"The answer {name} is missing." for name in tasks if name not in given]
    said += [f"The text {name} is not written." for name, text in texts_of(source, submitted).items() if not text]
    said += [f"The answer {name} is there {given.count(name)} times: the last one counts."
             for name in tasks if given.count(name) > 1]
    return said + [f"{name[:40]}{' ...' * (len(name) > 40)} is no task of this lab: has the first line of its cell "
                   "been changed?" for name in dict.fromkeys(given) if name not in tasks]
