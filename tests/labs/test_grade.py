"""Answers are found in whatever was handed in, and the instructor's checks alone decide on points."""
import json
import re
from copy import deepcopy

import nbformat
import pytest
from hypothesis import given, strategies as st
from IPython.core.interactiveshell import InteractiveShell

from grading import checks
from grading.answers import CURRENT, answers_of, load_ipython_extension, source_of
from grading.grade import grade
from grading.lab_source import labs, notebook_of
from grading.submission import Unreadable, cell_of, find_notebook, grade_file, read, remarks
from tests.labs.notebooks import answer_cell, cell, check_cell, notebook

ONE = "def one():\n    return 1"
CHECK = """
# One: it is one
from grading import expect, passed, run
expect(run(None, "one").results == [1], "it is not one", "count")
passed("one")
"""
SOURCE = notebook(cell("locked", "tools", "%load_ext grading\nHELPED = 2"), answer_cell("one", ONE),
                  answer_cell("two", "TWO = 2"), check_cell("check_one", CHECK),
                  check_cell("check_two", "# Two\nassert HELPED == 2", 2.5))


def given_cells(*cells):
    return nbformat.from_dict({"cells": [cell_of(one) for one in cells]})


def code(source, **about):
    return {"cell_type": "code", "source": source, "metadata": {"nbgrader": about} if about else {}}


def test_the_solution_has_all_points_and_says_so():
    first, second = grade(SOURCE, SOURCE)
    assert first == ("check_one", "One: it is one", 5, 5, "passed: one\n")
    assert second == ("check_two", "Two", 2.5, 2.5, "")
    assert not CURRENT and not checks.GIVEN


@pytest.mark.parametrize("source, said", [
    ("%%answer one\ndef one(): return 2", "it is not one\nHint: count"),
    ("%%answer one\nno Python", "SyntaxError"), ("%%answer one", "there is no function one: was it renamed"),
    ("%%answer one\n%timeit 1\n" + ONE, "SyntaxError"), ("%%answer one\ndef one(x): return 1", "TypeError"),
    ("%%answer one\ndef one(): return {'a': {1, 2}}", "a set cannot be passed"),
])
def test_a_wrong_answer_has_none_and_is_reported_why(source, said):
    first, second = grade(SOURCE, given_cells(code(source)))
    assert first.points == 0 and said in first.said and second.points == 2.5


EARLIER = notebook(answer_cell("one", """
def one():
    ### BEGIN SOLUTION
    return helper()


def helper():
    return 1
    ### END SOLUTION
"""), check_cell("check_one", CHECK), answer_cell("two", "def two(): return one() + 1"), check_cell("check_two", """
# Two: it is two
expect(run(None, "two").results == [2], "it is not two")
passed("two")
"""), answer_cell("three", "def three(): return two() + 1"), check_cell("check_three", """
# Three: it is three
expect(run(None, "three").results == [3], "it is not three")
passed("three")
"""))


@pytest.mark.parametrize("answers, points", [
    ({"one": "def one(): return 7"}, [0, 5, 5]),                        # a wrong line costs its own task ...
    ({"one": "no Python", "two": "def two(): return one()"}, [0, 0, 5]),
    ({"one": "def one(): return 7", "two": "def two(): return one() - 5"}, [0, 5, 5]),      # ... and nobody is harmed
    ({"one": "def none(): return 0\ndef one(): return 7", "two": "def two(): return one() + 1 + none()"}, [0, 5, 5]),
    ({"two": "def two(): return helper() + 1"}, [5, 0, 5]),             # the solution's own helpers are not given
    ({"three": "def three(): return 4"}, [5, 5, 0]), ({"one": "", "two": "", "three": ""}, [0, 0, 0]),
    ({"three": "def one(): return 0\ndef three(): return 3"}, [5, 5, 5]),
    ({"three": "import os\nos._exit(0)"}, [5, 5, 0]),
])
def test_a_task_that_builds_on_earlier_ones_is_checked_with_right_ones_too(answers, points):
    submitted = {"one": "def one(): return 1", "two": "def two(): return one() + 1",
                 "three": "def three(): return two() + 1", **answers}
    found = grade(EARLIER, given_cells(*(code(f"%%answer {name}\n{text}") for name, text in submitted.items())), "seed")
    assert [mark.points for mark in found] == points


def test_a_check_can_be_one_of_an_earlier_task_too():
    source = deepcopy(EARLIER)
    source.cells[-1].metadata["shardlab"] = {"also": "one"}
    wrong = {"one": "def one(): return 7", "two": "def two(): return one() - 5",
             "three": "def three(): return two() + 1"}
    cells = [code(f"%%answer {name}\n{text}") for name, text in wrong.items()]
    assert [mark.points for mark in grade(source, given_cells(*cells), "seed")] == [0, 5, 5]
    cells[2] = code("%%answer three\ndef three(): return one() + 2")
    assert [mark.points for mark in grade(source, given_cells(*cells), "seed")] == [0, 5, 0]
    assert [mark.points for mark in grade(EARLIER, given_cells(*cells), "seed")] == [0, 5, 5]


def test_what_is_said_of_an_answer_never_comes_from_the_run_with_the_courses_own():
    """It could tell their code."""
    spy = "def two():\n    print('filename', one.__code__.co_filename)\n    raise ValueError(one.__code__.co_filename)"
    wrong = given_cells(code("%%answer one\ndef one(): return 7"), code(f"%%answer two\n{spy}"))
    assert "ValueError: answer one" in (said := grade(EARLIER, wrong, "seed")[1].said) and "course" not in said
    right = given_cells(code("%%answer one\ndef one(): return 7"), code("%%answer two\ndef two(): return one() + 1"))
    assert grade(EARLIER, right, "seed")[1].said.startswith(
        "passed with right answers to the earlier tasks. With your own it fails:\nit is not two")


def test_what_a_check_did_not_foresee_is_no_crash():
    source = notebook(answer_cell("one", ONE), check_cell("check", "1 / 0"))
    mark, = grade(source, source)
    assert mark.points == 0 and "could not be checked (ZeroDivisionError: division by zero)" in mark.said


@pytest.mark.parametrize("cells, right", [
    ([code("%%answer one\n" + ONE)], True),                                                 # nbgrader's words are lost
    ([code(ONE, grade_id="one", solution=True)], True),                                     # the first line is
    ([code("\n\n%%answer one\n" + ONE, grade_id="one", solution=True)], True),
    ([code("%%answer one \n" + ONE, grade_id="two", solution=True)], True),                 # the first line counts
    ([code("%%answer three\n" + ONE, grade_id="one", solution=True)], True),
    # so it is in the notebook, too
    ([code("%%answer 1+1\n" + ONE, grade_id="one", solution=True)], True),
    ([code("%%answer one\nx"), code("%%answer one\n" + ONE)], True),                        # the last counts
    ([code("%%answer one\n" + ONE), code("%%answer one\nx")], True),
    # ... but leaves the name, as here
    ([code("%%answer one\ndef one(): return two()"), code("%%answer helper\ndef two(): return 1")], True),
    ([code(ONE)], False), ([{"cell_type": "markdown", "source": "%%answer one\n" + ONE}], False),
    ([code(CHECK, grade_id="check_one", grade=True, locked=True), code("%%answer one\ndef one(): return 0")], False),
])
def test_an_answer_is_the_cell_that_says_so(cells, right):
    submitted = given_cells(*cells)
    expected = right and not (len(cells) == 2 and cells[1]["source"].endswith("\nx"))
    assert (grade(SOURCE, submitted)[0].points == 5) == expected


@given(st.text(alphabet="a\n% ", max_size=10))
def test_lines_keep_their_numbers(body):
    for head in ("", "\n", "\n\n"):
        assert source_of(f"{head}%%answer x\n{body}") == f"{head}\n{body}"
    assert source_of(f"a{body}") == f"a{body}"


def test_remarks():
    odd = given_cells(code("%%answer one\n" + ONE), code("%%answer one\n" + ONE), code("%%answer three\n"))
    assert remarks(SOURCE, odd) == ["The answer two is missing.", "The answer one is there 2 times: the last one "
                                                                    "counts.",
                                    "three is no task of this lab: has the first line of its cell been changed?"]
    assert remarks(SOURCE, SOURCE) == []
    assert "another lab" in remarks(SOURCE, given_cells(code("1"), code("%%answer three")))[0]


BROKEN = {"": "is empty", " \n": "is empty", "{": "is not a notebook: it is not JSON", "[]": "has no cells",
          "3": "has no cells",
          "{}": "has no cells", '{"cells": 3}': "has no cells", '{"cells": [3]}': "has no cells",
          '{"cells": [{}]}': "has no cells", '{"cells": null}': "has no cells", "[" * 100_000: "it is not JSON",
          '{"cells": []}': "none of the answers",
          '{"cells": [{"cell_type": "code", "metadata": 3}]}': "none of the answers",
          '{"cells": [{"cell_type": "code", "source": [1], "metadata": {}}]}': "has no cells", "\0": "it is not JSON",
          '{"cells": [{"cell_type": "code", "metadata": {"nbgrader": {"grade_id": [], "solution": 1}}}]}': "none of"}


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:30])
def test_what_is_no_notebook_has_no_points_and_a_sentence(tmp_path, text):
    path = tmp_path / "lab.ipynb"
    path.write_text(text)
    found = grade_file(SOURCE, path)
    assert (found.points, found.of) == (0, 7.5) and BROKEN[text] in found.remarks[0]
    assert [mark.said for mark in found.marks] == found.remarks * 2


def test_bytes_that_are_no_text_and_files_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "lab.ipynb"
    path.write_bytes(b"\xff\xfe{}")
    assert "not JSON" in grade_file(SOURCE, path).remarks[0]
    assert "cannot be read" in grade_file(SOURCE, tmp_path / "none").remarks[0]
    monkeypatch.setattr("grading.submission.LARGEST", 2)
    assert "larger than" in grade_file(SOURCE, path).remarks[0]


def test_a_notebook_with_a_byte_order_mark_of_long_ago_or_with_half_a_character_is_read(tmp_path):
    path = tmp_path / "lab.ipynb"
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": ["%%answer one\n", ONE]}]}]}
    path.write_text(json.dumps(old), encoding="utf-8-sig")
    assert answers_of(read(path)) == {"one": "\n" + ONE}
    path.write_text('{"cells": [{"cell_type": "code", "source": "%%answer one\\n\\ud800"}]}')
    assert answers_of(read(path)) == {"one": "\n?"}


def test_the_notebook_of_a_folder(tmp_path):
    with pytest.raises(Unreadable, match="There is no notebook"):
        find_notebook(tmp_path, "lab.ipynb")
    for name in ("b.ipynb", "lab.ipynb"):
        (tmp_path / name).write_text("")
        assert find_notebook(tmp_path, "lab.ipynb").name == name
    with pytest.raises(Unreadable, match="2 notebooks, and none of them is called c.ipynb"):
        find_notebook(tmp_path, "c.ipynb")


@pytest.fixture
def shell():
    found = InteractiveShell()
    load_ipython_extension(found)
    yield found
    CURRENT.clear()


def test_the_magic_runs_a_cell_and_notes_it(shell, capsys):
    assert shell.run_cell("%%answer one\nx = 3").success
    assert shell.user_ns["x"] == 3 and CURRENT == {"one": "\nx = 3\n"}
    shell.run_cell("%%answer 1+1\nx = 4")
    assert "needs the name of the task" in capsys.readouterr().out and "x = 3" in CURRENT["one"]


def test_an_answer_that_fails_is_noted_and_shown_once(shell, capsys):
    assert not shell.run_cell("%%answer one\nraise ValueError('so')").success
    assert "ValueError" in CURRENT["one"]
    said = re.sub("\x1b[^m]*m", "", "".join(capsys.readouterr()))
    assert said.count("ValueError: so") == 1 and said.count("Traceback") == 1, said
    assert said.endswith("The answer one has failed: see the error above.\n")


@pytest.mark.parametrize("line, error", [("no Python", "SyntaxError"), ("1 / 0", "ZeroDivisionError")])
def test_a_failing_line_is_reported_as_the_cell_numbers_it(shell, capsys, line, error):
    """The line of the magic is the first one, for the notebook's reader and in what a check says."""
    assert not shell.run_cell(f"%%answer one\nx = 3\n{line}").success
    said = re.sub("\x1b[^m]*m", "", "".join(capsys.readouterr()))
    assert re.search(rf"line 3|:3\b|-> 3 {re.escape(line)}", said) and error in said, said
    assert CURRENT["one"].splitlines()[2] == line


@pytest.mark.parametrize("source", labs(), ids=lambda path: path.stem)
def test_a_lab_is_a_notebook_that_nbgrader_takes(source):
    found = notebook_of(source)
    nbformat.validate(found)
    about = [cell.metadata.nbgrader for cell in found.cells if "nbgrader" in cell.metadata]
    names = [one.grade_id for one in about]
    assert len(set(names)) == len(names) and sum(one.get("points", 0) for one in about) > 0
    for cell_ in found.cells:
        about = cell_.metadata.get("nbgrader", {})
        answer = about.get("solution") and cell_.cell_type == "code"
        assert ("### BEGIN SOLUTION" in cell_.source) == bool(answer)
        assert ("### BEGIN HIDDEN TESTS" not in cell_.source) or about.get("grade")
        if answer:
            assert cell_.source.startswith(f"%%answer {about.grade_id}\n")
