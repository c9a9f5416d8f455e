"""nbgrader's grading of a lab through `course.grading.grade`, on limited ranks, without running the student's notebook.

`nbgrader_config.py` of a course calls `configure`. Then `nbgrader autograde` puts the answers of a submission, and
nothing else of it, into the instructor's notebook, and writes each check's message below it. A check without an error
gives its points.
"""
import html
import os
import re
import stat
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert
from nbconvert.exporters import HTMLExporter, NotebookExporter
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import (AssignLatePenalties, CheckCellMetadata, ClearHiddenTests, LimitOutput,
                                    NbGraderPreprocessor, SaveAutoGrades)
from nbgrader.utils import compute_checksum, parse_utc

from course.grading.answers import MAGIC, about, name_of
from course.grading.draws import SEED_FILE, read_seed
from course.grading.grade import Mark, title
from course.grading.hunts import FILE, hunted_by
from course.grading.submission import Unreadable, find_notebook, grade_file, read, read_file
from course.grading.writing import STUB, is_writing, quote, texts_of

FORMULA = re.compile(r"(\$\$?)(.+?)\1", re.DOTALL)
CODE = re.compile(r"(```.*?```|`[^`]*`)", re.DOTALL)
# The names of the files of Canvas's "Download Submissions": liddellalice_LATE_17_4711_lab1_collectives-2.ipynb
CANVAS_FILE = r".*/[^_/]+_(LATE_)?(?P<student_id>\d+)_\d+_(?P<file_id>.+?)(-\d+)?\.ipynb$"


def configure(c) -> None:
    """Configure nbgrader; `c` is the result of its `get_config()`."""
    CourseDirectory.get_existing_timestamp = timestamp_of       # nbgrader's own ends with the first that is no time
    c.CourseDirectory.course_id = "shardlab"
    c.FileNameCollectorPlugin.named_regexp = CANVAS_FILE
    c.GenerateFeedback.exporter_class = FeedbackExporter
    c.Autograde.pre_convert_hook = select_lab
    c.Autograde.exporter_class = LabExporter
    c.Autograde.autograde_preprocessors = [RunChecks, LimitOutput, SaveAutoGrades, AssignLatePenalties,
                                           ClearHiddenTests,    # else students would see them in their feedback
                                           CheckCellMetadata]


def select_lab(notebooks: list[str], **_) -> None:
    """Replace the notebooks of a student's folder by the lab's own, which `LabExporter` makes, whatever is there.

    nbgrader then copies the folder's other files, and later gives them back with the feedback.
    """
    folder = Path(notebooks[0]).parent
    remove_links(folder)
    notebooks[:] = [str(folder / f"{folder.name}.ipynb")]


def remove_links(folder: Path) -> None:
    """Remove whatever is neither a file nor a folder from a submission: nbgrader would copy what a link leads to."""
    if folder.is_symlink():
        folder.unlink()
        folder.mkdir()
    for parent, folders, files in os.walk(folder):
        for path in (os.path.join(parent, name) for name in folders + files):
            if not stat.S_ISREG(kind := os.lstat(path).st_mode) and not stat.S_ISDIR(kind):
                os.remove(path)


def timestamp_of(coursedir, folder: str):
    """Return when a submission was made. One without a readable time is graded as if it had none."""
    path = Path(folder, "timestamp.txt")
    try:
        return parse_utc(read_file(path)[:99].decode().strip() or None) if os.path.lexists(path) else None
    except Exception:       # dateutil raises many kinds
        coursedir.log.warning("%s does not hold a time: the submission counts as one without a time.", path)
        return None


class LabExporter(NotebookExporter):
    """An exporter that replaces a submission by the instructor's notebook with the student's answers.

    So nbgrader gets no unreadable file, and no missing, duplicated or changed cell, and whoever opens the result gets
    no page that a student has written.
    """

    def from_filename(self, filename: str, resources=None, **options):
        """Export the instructor's notebook with the answers of the submission in this file."""
        path = Path(filename)
        try:
            submitted = read(find_notebook(path.parent, path.name))
        except Unreadable:
            submitted = nbformat.from_dict({"cells": []})
        converter: Any = self.parent
        notebook = assemble(read_source(converter.coursedir, resources["nbgrader"]), submitted)
        return self.from_notebook_node(notebook, resources, **options)


class RunChecks(NbGraderPreprocessor):
    """A preprocessor that replaces nbgrader's Execute: it grades on limited ranks."""

    def preprocess(self, nb, resources):
        """Grade a submission, and write the message of each check below it."""
        lab, coursedir = resources["nbgrader"], self.parent.parent.coursedir
        folder = Path(coursedir.format_path(coursedir.submitted_directory, lab["student"], lab["assignment"]))
        seed_file = Path(coursedir.root) / SEED_FILE
        seed = read_seed(seed_file) if seed_file.exists() else None
        with hunted_by([lab["student"]], Path(coursedir.root) / FILE):
            graded = grade_file(read_source(coursedir, lab), folder, f"{lab['notebook']}.ipynb", seed)
        by_check = {mark.check: mark for mark in graded.marks}
        for cell in nb.cells:
            if mark := by_check.get(about(cell).get("grade_id", "")):
                cell.outputs = [output_of(mark)]
        if graded.remarks:
            listed = "\n".join(f"- {escape(remark)}" for remark in graded.remarks)
            nb.cells.insert(0, nbformat.v4.new_markdown_cell(listed))
        return nb, resources


class FeedbackExporter(HTMLExporter):
    """An exporter of feedback that lists checks by their titles, and whose formulas need no network."""

    def from_notebook_node(self, nb, resources=None, **options):
        """Export a graded notebook, in which nbgrader lists every check as "Test cell"."""
        nb = deepcopy(nb)
        for cell in nb.cells:
            if cell.cell_type == "markdown" and not is_writing(cell):       # what a student wrote stays as it is
                cell.source = "".join(part if i % 2 else FORMULA.sub(as_mathml, part)
                                      for i, part in enumerate(CODE.split(cell.source)))
        page, resources = super().from_notebook_node(nb, resources, **options)
        titles = (title(cell.source) for cell in nb.cells
                  if about(cell).get("grade") and not about(cell).get("solution"))
        return re.sub(r"(?<=>)Test cell(?=</a>)", lambda _: html.escape(next(titles)), page), resources


def as_mathml(formula: re.Match) -> str:
    """Convert a formula of TeX, which a browser then shows by itself."""
    return convert(formula[2], display="block" if formula[1] == "$$" else "inline")


def read_source(coursedir, lab: dict):
    """Read the instructor's notebook."""
    folder = coursedir.format_path(coursedir.source_directory, ".", lab["assignment"])
    return nbformat.read(Path(folder) / f"{lab['notebook']}.ipynb", as_version=4)


def assemble(source, submitted):
    """Return the instructor's notebook with the answers of a submission."""
    given = {name: cell.source for cell in submitted.cells if (name := name_of(cell))}
    texts = texts_of(source, submitted)
    for cell in source.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if name := name_of(cell):
            cell.source = given.get(name, f"{MAGIC} {name}\n# This answer is not in the submission.")
        elif is_writing(cell):
            cell.source = quote(text) if (text := texts[about(cell)["grade_id"]]) else STUB
            if not text:
                about(cell)["checksum"] = compute_checksum(cell)      # tells nbgrader that the text gets no points
    return source


def output_of(mark: Mark):
    """Return the output of a check's cell for nbgrader: an error means no points."""
    if mark.points < mark.of:
        return nbformat.v4.new_output("error", ename="CheckFailed", evalue=mark.said, traceback=mark.said.splitlines())
    return nbformat.v4.new_output("stream", name="stdout", text=mark.said)


def escape(text: str) -> str:
    """Escape a text for Markdown: it may contain names that students have chosen."""
    return "".join(f"&#{ord(c)};" if c in "<>&*_`[]\\$|" else c for c in text)
