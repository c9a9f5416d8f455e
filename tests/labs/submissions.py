"""Submissions of labs, and the marks that they get."""
import re
from copy import deepcopy
from functools import cache
from pathlib import Path

from grading.answers import CURRENT, answers_of
from grading.draws import Draws, graded
from grading.grade import Mark, marks
from grading.lab_source import LABS, notebook_of

HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n.*?### END HIDDEN TESTS", re.DOTALL)
SEED = "a seed that the answers of these tests do not know"


@cache
def solution(lab: str):
    """Return the instructor's notebook of a lab, for example of `lab1_collectives`."""
    return notebook_of(Path(LABS / f"{lab}.py"))


def marks_of(lab: str, seed: str = SEED, **answers: str) -> dict[str, Mark]:
    """Return the marks, by check, of the solution with these answers replaced. The ranks go on for the next call."""
    CURRENT.clear()
    CURRENT.update(answers_of(solution(lab)))
    assert not set(answers) - set(CURRENT), "there is no such answer"
    CURRENT.update(answers)
    with graded(seed, CURRENT) as draws:
        return {mark.check: mark for mark in marks(solution(lab), draws)}


def marks_in_a_notebook(lab: str, hidden: bool = False, **answers: str) -> dict[str, Mark]:
    """Return the marks in a notebook: with the numbers that checks draw there, with or without the hidden tests."""
    seen = deepcopy(solution(lab))
    for cell in seen.cells:
        cell.source = cell.source if hidden else HIDDEN.sub("", cell.source)
    CURRENT.clear()
    CURRENT.update({**answers_of(seen), **answers})
    return {mark.check: mark for mark in marks(seen, Draws("", {}))}


def plant(lab: str, answer: str, old: str, new: str) -> dict[str, str]:
    """Return an answer's solution with a planted mistake: `new` replaces `old`, which must occur once."""
    source = answers_of(solution(lab))[answer]
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {answer}"
    return {answer: source.replace(old, new)}


def lost_checks(found: dict[str, Mark]) -> set[str]:
    """Return the names of the checks that did not give all their points."""
    return {name for name, mark in found.items() if mark.points < mark.of}


def assert_loses(lab: str, mistake: str, answer: str, old: str, new: str, checks: set[str], words: str) -> None:
    """Assert that with this planted mistake exactly these checks lose points, and that their messages contain one of
    these phrases ("a|b").

    If the mistake is named "... (hidden)", the part of the checks that students see must pass.
    """
    found = marks_of(lab, **plant(lab, answer, old, new))
    assert lost_checks(found) == checks
    assert not mistake.endswith("(hidden)") or all(found[name].said.startswith("passed") for name in checks)
    said = "\n".join(found[name].said for name in checks)
    assert any(word in said for word in words.split("|")), said
