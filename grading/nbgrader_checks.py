"""nbgrader's grading of a lab through `grading.grade`, on limited ranks, without running the student's notebook.

`nbgrader_config.py` of a course calls `configure`. Then `nbgrader autograde` takes from a submission the answers alone,
puts them into the instructor's notebook, and writes below each check what it said: with no error it gives its points.
"""
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import NotebookExporter
from nbgrader.preprocessors import (AssignLatePenalties, CheckCellMetadata, ClearHiddenTests, LimitOutput,
                                    NbGraderPreprocessor, SaveAutoGrades)

from grading.answers import MAGIC, name_of
from grading.draws import SEED_FILE, read_seed
from grading.grade import Mark
from grading.submission import Unreadable, found_in, grade_file, read

# What Canvas calls the files of "Download Submissions": liddellalice_LATE_17_4711_lab1_collectives-2.ipynb
CANVAS_FILE = r".*/[^_/]+_(LATE_)?(?P<student_id>\d+)_\d+_(?P<file_id>.+?)(-\d+)?\.ipynb$"


def configure(c) -> None:
    """Configure nbgrader; `c` is its configuration, as from `get_config()`."""
    c.CourseDirectory.course_id = "shardlab"
    c.FileNameCollectorPlugin.named_regexp = CANVAS_FILE
    c.Autograde.pre_convert_hook = the_lab_alone
    c.Autograde.exporter_class = LabExporter
    c.Autograde.autograde_preprocessors = [RunChecks, LimitOutput, SaveAutoGrades, AssignLatePenalties,
                                           ClearHiddenTests,    # or students would see them in their feedback
                                           CheckCellMetadata]


def the_lab_alone(notebooks: list[str], **_) -> None:
    """Let nbgrader see only the lab's own notebook, which `LabExporter` finds, whatever is in a student's folder."""
    folder = Path(notebooks[0]).parent
    notebooks[:] = [str(folder / f"{folder.name}.ipynb")]


class LabExporter(NotebookExporter):
    """An exporter that replaces a submission by the instructor's notebook with the student's answers.

    So nbgrader meets no file that it cannot read, no cell that is missing, twice, or other than it should be, and who
    opens the result meets no page that a student has written.
    """

    def from_filename(self, filename: str, resources=None, **options):
        path, about = Path(filename), resources["nbgrader"]
        try:
            submitted = read(found_in(path.parent, path.name))
        except Unreadable:
            submitted = nbformat.from_dict({"cells": []})
        converter: Any = self.parent
        return self.from_notebook_node(assembled(source(converter.coursedir, about), submitted), resources, **options)


class RunChecks(NbGraderPreprocessor):
    """A preprocessor that replaces nbgrader's Execute."""

    def preprocess(self, nb, resources):
        about, coursedir = resources["nbgrader"], self.parent.parent.coursedir
        folder = Path(coursedir.format_path(coursedir.submitted_directory, about["student"], about["assignment"]))
        seed_file = Path(coursedir.root) / SEED_FILE
        seed = read_seed(seed_file) if seed_file.exists() else None
        graded = grade_file(source(coursedir, about), folder, f"{about['notebook']}.ipynb", seed)
        by_check = {mark.check: mark for mark in graded.marks}
        for cell in nb.cells:
            if mark := by_check.get(cell.metadata.get("nbgrader", {}).get("grade_id")):
                cell.outputs = [output_of(mark)]
        if graded.remarks:
            said = "\n".join(f"- {escaped(remark)}" for remark in graded.remarks)
            nb.cells.insert(0, nbformat.v4.new_markdown_cell(said))
        return nb, resources


def source(coursedir, about: dict):
    """Return the instructor's notebook."""
    folder = coursedir.format_path(coursedir.source_directory, ".", about["assignment"])
    return nbformat.read(Path(folder) / f"{about['notebook']}.ipynb", as_version=4)


def assembled(source, submitted):
    """Return the instructor's notebook with the answers of a submission."""
    given = {name: cell.source for cell in submitted.cells if (name := name_of(cell))}
    for cell in source.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if name := name_of(cell):
            cell.source = given.get(name, f"{MAGIC} {name}\n# This answer is not in the submission.")
    return source


def output_of(mark: Mark):
    """Return a cell's output for nbgrader: an error means no points."""
    if mark.points < mark.of:
        return nbformat.v4.new_output("error", ename="CheckFailed", evalue=mark.said, traceback=mark.said.splitlines())
    return nbformat.v4.new_output("stream", name="stdout", text=mark.said)


def escaped(text: str) -> str:
    """Escape a text for a page of Markdown: its names are chosen by students."""
    return "".join(f"&#{ord(c)};" if c in "<>&*_`[]\\$|" else c for c in text)
