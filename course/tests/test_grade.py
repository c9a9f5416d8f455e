"""Answers are found in whatever was handed in, and the instructor's checks alone decide on points."""
import re
from copy import deepcopy

import nbformat
import pytest

from course.grading import checks, draws as module
from course.grading.answers import CURRENT
from course.grading.draws import check_data, read_seed, secret_draws
from course.grading.grade import grade
from course.grading.submission import Unreadable, cell_of, find_notebook, grade_file, remarks
from course.tests.notebooks import answer_cell, cell, check_cell, notebook
from reference.errors import UserError

ONE = "def one():\n    return 1"
CHECK = """
# One: it is one
from course.grading import expect, passed, run
expect(run(None, "one").results == [1], "it is not one", "count")
passed("one")
"""
SOURCE = notebook(cell("locked", "tools", "%load_ext course.grading\nHELPED = 2"), answer_cell("one", ONE),
                  answer_cell("two", "TWO = 2"), check_cell("check_one", CHECK),
                  check_cell("check_two", "# Two\nassert HELPED == 2", 2.5))


def submission(*cells):
    return nbformat.from_dict({"cells": [cell_of(one) for one in cells]})


def code(source, **about):
    return {"cell_type": "code", "source": source, "metadata": {"nbgrader": about} if about else {}}


def answers(**sources):
    return submission(*(code(f"%%answer {name}\n{source}") for name, source in sources.items()))


def test_the_solution_has_all_points_and_says_so():
    assert grade(SOURCE, SOURCE) == [("check_one", "One: it is one", 5, 5, "passed: one\n"),
                                     ("check_two", "Two", 2.5, 2.5, "")]
    assert not CURRENT and not checks.GIVEN


def test_a_wrong_answer_has_none_and_is_reported_why_even_if_its_check_did_not_foresee_it():
    source = notebook(*SOURCE.cells, check_cell("check_three", "1 / 0"))
    first, second, third = grade(source, answers(one="def one(): return 2"))
    assert first.points == 0 and first.said == "it is not one\nHint: count" and second.points == 2.5
    assert third.points == 0 and "ZeroDivisionError" in third.said


# ---- tasks that build on earlier ones ----

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
"""), answer_cell("three", "def three(): return two() + 1"), check_cell("check_three", """
# Three: it is three
expect(run(None, "three").results == [3], "it is not three")
"""))
RIGHT = {"one": "def one(): return 1", "two": "def two(): return one() + 1", "three": "def three(): return two() + 1"}
SEVEN = {"one": "def one(): return 7"}


@pytest.mark.parametrize("wrong, points", [
    (SEVEN, [0, 5, 5]),                                                 # a wrong line costs its own task ...
    ({"one": "no Python", "two": "def two(): return one()"}, [0, 0, 5]),
    (SEVEN | {"two": "def two(): return one() - 5"}, [0, 5, 5]),        # ... and nobody is harmed
    ({"two": "def two(): return helper() + 1"}, [5, 0, 5]),             # the solution's own helpers are not given
    ({"three": "def one(): return 0\ndef three(): return 3"}, [5, 5, 5]),
    ({"three": "import os\nos._exit(0)"}, [5, 5, 0])])
def test_a_task_that_builds_on_earlier_ones_is_checked_with_right_ones_too(wrong, points):
    assert [mark.points for mark in grade(EARLIER, answers(**RIGHT | wrong), "seed")] == points


def test_a_check_can_be_one_of_an_earlier_task_too():
    source = deepcopy(EARLIER)
    source.cells[-1].metadata["shardlab"] = {"also": "one"}
    wrong = {**RIGHT, **SEVEN, "three": "def three(): return one() + 2"}
    assert [[mark.points for mark in grade(one, answers(**wrong), "seed")] for one in (source, EARLIER)] == [
        [0, 5, 0], [0, 5, 5]]


def test_what_is_said_of_an_answer_never_comes_from_the_run_with_the_courses_own():
    """It could tell their code."""
    spy = "def two(): raise ValueError(one.__code__.co_filename)"
    said = grade(EARLIER, answers(**SEVEN, two=spy), "seed")[1].said
    assert "ValueError: answer one" in said and "course" not in said
    said = grade(EARLIER, answers(**RIGHT | SEVEN), "seed")[1].said
    assert said == "passed with right answers to the earlier tasks. With your own it fails:\nit is not two"


# ---- what is handed in ----


@pytest.mark.parametrize("cells, right", [
    ([code("%%answer one\n" + ONE)], True),                                                 # nbgrader's words are lost
    ([code(ONE, grade_id="one", solution=True)], True),                                     # the first line is
    ([code("\n\n%%answer one \n" + ONE, grade_id="two", solution=True)], True),             # the first line counts
    ([code("%%answer 1+1\n" + ONE, grade_id="one", solution=True)], True),                  # not a name
    ([code("%%answer one\nx"), code("%%answer one\n" + ONE)], True),                        # the last counts
    ([code("%%answer one\n" + ONE), code("%%answer one\nx")], False),
    ([code(ONE)], False), ([{"cell_type": "markdown", "source": "%%answer one\n" + ONE}], False),
    ([code(CHECK, grade_id="check_one", grade=True, locked=True), code("%%answer one\ndef one(): return 0")], False)])
def test_an_answer_is_the_cell_that_says_so(cells, right):
    assert (grade(SOURCE, submission(*cells))[0].points == 5) == right


def test_remarks():
    odd = submission(code("%%answer one\n" + ONE), code("%%answer one\n" + ONE), code("%%answer three\n"))
    missing, twice, strange = remarks(SOURCE, odd)
    assert "two is missing" in missing and "one is there 2 times" in twice and "three is no task" in strange
    assert remarks(SOURCE, SOURCE) == []


@pytest.mark.parametrize("data, words", [
    (b" \n", "is empty"), (b"[" * 100_000, "not JSON"), (b'{"cells": 3}', "has no cells"),
    (b'{"cells": [{"cell_type": "code", "source": [1], "metadata": {}}]}', "has no cells"),
    (b'{"cells": [{"cell_type": "code", "metadata": {"nbgrader": {"grade_id": [], "solution": 1}}}]}', "none of"),
    (b'{"cells": []}' + b" " * 99, "larger than"), (None, "cannot be read"),
    ("/dev/null", "is a link")], ids=lambda data: str(data)[:30])
def test_what_is_not_a_notebook_has_no_points_and_a_sentence(tmp_path, monkeypatch, data, words):
    path = tmp_path / "lab.ipynb"
    if isinstance(data, str):
        path.symlink_to(data)
    elif data:
        path.write_bytes(data)
    if words == "larger than":
        monkeypatch.setattr("course.grading.submission.LARGEST", 99)
    found = grade_file(SOURCE, path)
    assert (found.points, found.of) == (0, 7.5) and words in found.remarks[0]
    assert [mark.said for mark in found.marks] == found.remarks * 2


def test_the_notebook_of_a_folder(tmp_path):
    with pytest.raises(Unreadable, match="There is no notebook"):
        find_notebook(tmp_path, "lab.ipynb")
    for name in ("b.ipynb", "lab.ipynb"):
        (tmp_path / name).write_text("")
        assert find_notebook(tmp_path, "lab.ipynb").name == name
    with pytest.raises(Unreadable, match="2 notebooks"):
        find_notebook(tmp_path, "c.ipynb")


# ---- the numbers that checks draw ----

EMPTY_ANSWERS = {"f": "def f(): pass"}
DRAW = "from course.grading import check_data\nprint([check_data('x').integers(10 ** 9) for _ in range(2)])"
DRAWING = notebook(cell("locked", "tools", "TOOLS = 1"), answer_cell("f", EMPTY_ANSWERS["f"]),
                  check_cell("first", f"# First\n{DRAW}"), check_cell("second", f"# Second\n{DRAW}"))


def number(name: str = "x") -> int:
    return int(check_data(name).integers(1 << 60))


def numbers(seed: str, answers: dict[str, str] = EMPTY_ANSWERS, checks=("a", "b")) -> dict[str, list[int]]:
    """Return each check's numbers: it draws twice by one name and once by another."""
    found = {}
    with secret_draws(seed, answers) as mine:
        for check in checks:
            mine.begin(check)
            found[check] = [number(), number(), number("y")]
    return found


def test_no_numbers_come_twice_but_in_a_notebook():
    assert number() == number() != number("y")
    seeds, answers = ("one", "two"), (EMPTY_ANSWERS, {"f": EMPTY_ANSWERS["f"] + " "}, {"g": EMPTY_ANSWERS["f"]})
    found = [x for seed in seeds for given in answers for drawn in numbers(seed, given).values() for x in drawn]
    assert len(found) == 36 and len({*found, number(), number("y")}) == 38
    assert not module.GRADED, "a notebook's numbers again"


def test_the_same_seed_gives_the_same_submission_the_same_numbers_whatever_other_checks_have_drawn():
    assert numbers("one") == numbers("one") and numbers("one")["b"] == numbers("one", checks=("b",))["b"]


def test_marks_can_be_repeated_with_the_seed_that_was_printed(capsys, tmp_path):
    given, drawn = grade(DRAWING, DRAWING, "mine"), grade(DRAWING, DRAWING)
    seed, = re.findall(r"No seed was given: .* a new one, (\w{32})\n", capsys.readouterr().out)
    (tmp_path / "seed").write_text(f"{seed}\n")
    assert drawn == grade(DRAWING, DRAWING, read_seed(tmp_path / "seed"))
    assert given == grade(DRAWING, DRAWING, "mine")
    said = [mark.said for mark in given + drawn + grade(DRAWING, DRAWING, "another")]
    assert len(set(said)) == 6 and "seed" not in capsys.readouterr().out
    assert "mine" not in str(given), "from its numbers the seed cannot be found"
    (tmp_path / "seed").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        read_seed(tmp_path / "seed")
