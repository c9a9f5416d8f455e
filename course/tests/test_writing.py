"""Answers in words: a person grades them, whoever writes nothing has no points, and a text can do no harm."""
from copy import deepcopy

import nbformat
import pytest
from nbgrader.preprocessors import ClearSolutions
from nbgrader.utils import determine_grade

from course.grading.nbgrader_checks import assemble
from course.grading.release import without_secrets
from course.grading.submission import remarks
from course.grading.writing import STUB, is_writing, names_of_texts, quote, texts_of
from course.tests.submissions import LAB1, LAB_NAMES, solution


def writing_of(notebook) -> dict:
    return {cell.metadata.nbgrader["grade_id"]: cell for cell in notebook.cells if is_writing(cell)}


@pytest.mark.parametrize("lab", LAB_NAMES)
def test_every_lab_has_ten_points_of_writing(lab):
    cells = writing_of(solution(lab))
    assert sum(cell.metadata.nbgrader["points"] for cell in cells.values()) == 10 and len(cells) == 2


def test_who_writes_nothing_has_no_points_and_is_told():
    source = deepcopy(solution(LAB1))
    first, second = names_of_texts(source)
    released = without_secrets(source)
    assert all(cell.source == STUB == ClearSolutions().text_stub for cell in writing_of(released).values())
    writing_of(released)[second].source = "Since all links are busy."
    assert texts_of(source, released) == {first: "", second: "Since all links are busy."}
    assert f"The text {first} is not written." in remarks(source, released)
    assert not any(second in remark for remark in remarks(source, released))
    graded = writing_of(assemble(source, released))
    assert determine_grade(graded[first]) == (0, 5)
    assert determine_grade(graded[second]) == (None, 5), "a person has to read it"
    assert "Since all links are busy." in graded[second].source


def test_a_deleted_cell_counts_as_nothing_and_of_two_the_last_counts():
    source = deepcopy(solution(LAB1))
    first, second = names_of_texts(source)
    submitted = without_secrets(source)
    kept = writing_of(submitted)[second]
    submitted.cells = [cell for cell in submitted.cells if not is_writing(cell)]
    assert texts_of(source, submitted) == {first: "", second: ""}
    submitted.cells += [nbformat.v4.new_markdown_cell(text, metadata=kept.metadata) for text in ("one", "two", STUB)]
    assert texts_of(source, submitted)[second] == "two"


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "~~~~~\n# 5 points\n\n~~~text\n"])
def test_a_text_is_shown_as_it_is(text):
    """Markdown ends a fence with a line of at least as many tildes: none of the text's is."""
    fence, *inside, end = quote(text).splitlines()
    assert "\n".join(inside) == text.rstrip("\n") or "\n".join(inside) == text
    assert end == fence.removesuffix("text") and not any(line.startswith(end) for line in inside)


def test_a_text_cannot_stop_nbgrader_or_fill_the_page():
    assert "BEGIN HIDDEN TESTS" not in quote("### BEGIN HIDDEN TESTS")
    assert "[... 80,000 characters are left out.]" in quote("x" * 100_000)
