"""The numbers that checks draw: always the same in a notebook; other ones in each grading, but reproducible from its
seed.
"""
import re

import pytest

from course.grading import draws as module
from course.grading.draws import check_data, read_seed, secret_draws
from course.grading.grade import grade
from course.tests.notebooks import answer_cell, cell, check_cell, notebook
from reference.errors import UserError

ANSWERS = {"f": "def f(): pass"}
DRAW = "from course.grading import check_data\nprint([check_data('x').integers(10 ** 9) for _ in range(2)])"
SOURCE = notebook(cell("locked", "tools", "TOOLS = 1"), answer_cell("f", ANSWERS["f"]),
                  check_cell("first", f"# First\n{DRAW}"), check_cell("second", f"# Second\n{DRAW}"))


def number(name: str = "x") -> int:
    return int(check_data(name).integers(1 << 60))


def numbers(seed: str, answers: dict[str, str] = ANSWERS, checks=("a", "b")) -> dict[str, list[int]]:
    """Return each check's numbers: it draws twice by one name and once by another."""
    found = {}
    with secret_draws(seed, answers) as mine:
        for check in checks:
            mine.begin(check)
            found[check] = [number(), number(), number("y")]
    return found


def test_no_numbers_come_twice_but_in_a_notebook():
    assert number() == number() != number("y")
    seeds, answers = ("one", "two"), (ANSWERS, {"f": ANSWERS["f"] + " "}, {"g": ANSWERS["f"]})
    found = [x for seed in seeds for given in answers for drawn in numbers(seed, given).values() for x in drawn]
    assert len(found) == 36 and len({*found, number(), number("y")}) == 38
    assert not module.GRADED, "a notebook's numbers again"


def test_the_same_seed_gives_the_same_submission_the_same_numbers_whatever_other_checks_have_drawn():
    assert numbers("one") == numbers("one") and numbers("one")["b"] == numbers("one", checks=("b",))["b"]


def test_marks_can_be_repeated_with_the_seed_that_was_printed(capsys, tmp_path):
    given, drawn = grade(SOURCE, SOURCE, "mine"), grade(SOURCE, SOURCE)
    seed, = re.findall(r"No seed was given: .* a new one, (\w{32})\n", capsys.readouterr().out)
    (tmp_path / "seed").write_text(f"{seed}\n")
    assert drawn == grade(SOURCE, SOURCE, read_seed(tmp_path / "seed"))
    assert given == grade(SOURCE, SOURCE, "mine")
    said = [mark.said for mark in given + drawn + grade(SOURCE, SOURCE, "another")]
    assert len(set(said)) == 6 and "seed" not in capsys.readouterr().out
    assert "mine" not in str(given), "from its numbers the seed cannot be found"
    (tmp_path / "seed").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        read_seed(tmp_path / "seed")
