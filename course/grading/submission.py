"""Submissions, which may contain anything: they are read without trust, and oddities are reported in sentences."""
import json
import os
import stat
from pathlib import Path
from typing import NamedTuple

import nbformat

from course.grading.answers import answers_of, name_of
from course.grading.grade import Mark, grade, no_marks
from course.grading.sandbox import sanitize
from course.grading.writing import texts_of
from mpi_impl.runtime.files import opened_to_read
from reference.errors import UserError

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
        submitted = read(find_notebook(path, name) if os.path.isdir(path) else path)
    except Unreadable as problem:
        sentence = sanitize(str(problem))
        return Graded(no_marks(source, sentence), [sentence])
    said = remarks(source, submitted)
    if not set(answers_of(source)) & set(answers_of(submitted)):
        return Graded(no_marks(source, said[0]), said)
    return Graded(grade(source, submitted, seed), said)


def find_notebook(folder: Path, name: str) -> Path:
    """Return the path of the notebook of this name in a folder, else of the only one. Raises Unreadable."""
    there = [path for path in sorted(folder.glob("*.ipynb")) if is_regular(path)]
    if folder / name in there:
        return folder / name
    if len(there) == 1:
        return there[0]
    if not there:
        raise Unreadable(f"There is no notebook: {name} was expected, as a file and not as a link.")
    raise Unreadable(f"There are {len(there)} notebooks, and none of them is called {name}: submit that one.")


def is_regular(path: Path) -> bool:
    """Report whether a path is a regular file, and not a link: a student's link may lead to the instructor's files."""
    return stat.S_ISREG(os.lstat(path).st_mode)


def read(path: Path):
    """Read the cells of a notebook: kind, text, and nbgrader's metadata. Raises Unreadable."""
    data = read_file(path)
    try:
        cells = [cell_of(cell) for cell in cells_of(json.loads(data.decode("utf-8-sig")))]
        # JSON can hold lone surrogates, which no file can.
        writable = json.dumps(cells, ensure_ascii=False).encode(errors="replace")
        return nbformat.from_dict({"cells": json.loads(writable)})
    except (ValueError, RecursionError):
        raise Unreadable(f"{path.name} is {'not a notebook: it is not JSON' if data.strip() else 'empty'}. Open it in "
                         "Jupyter, save it, and submit it again.") from None
    except (KeyError, TypeError, AttributeError):
        raise Unreadable(f"{path.name} is not a notebook: it is JSON, but has no cells. Open it in Jupyter, save it, "
                         "and submit it again.") from None


def read_file(path: Path) -> bytes:
    """Read a submitted file. Raises Unreadable."""
    try:
        if not is_regular(path):
            raise Unreadable(f"{path.name} is a link, a pipe or a device: submit the notebook itself.")
        with opened_to_read(str(path), links=False) as file:
            if os.fstat(file.fileno()).st_size > LARGEST:
                raise Unreadable(f"{path.name} is larger than {LARGEST >> 20} MB: clear its outputs, and submit it "
                                 "again.")
            return file.read()
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read: {error.strerror}.") from None
    except UserError as error:
        raise Unreadable(str(error).replace(str(path), path.name)) from None


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
    return {"cell_type": str(cell["cell_type"]), "source": text,
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
