"""Submissions of labs, and the marks that they get."""
import re
from copy import deepcopy
from functools import cache

import nbformat

from course.grading.answers import CURRENT, answers_of
from course.grading.draws import Draws, pushed, secret_draws
from course.grading.grade import Mark, marks
from course.grading.hunts import HUNTED, Culprit
from course.grading.lab_source import labs, notebook_of
from course.grading.release import without_secrets
from course.grading.variants import PUBLIC

SOURCES = {source.stem: source for source in labs()}
LAB1, LAB2, LAB3, LAB4, LAB5, LAB6, LAB7, LAB8, *_ = LAB_NAMES = tuple(SOURCES)
HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n.*?### END HIDDEN TESTS", re.DOTALL)
# Examples of bugs, which the solution of lab 7 names: lines 33 and 34 add up over ranks, and divide by the loss scale.
PRACTICE = {"forward": Culprit("mpi_impl/comm/regions.py", 33, 33, "missing communication"),
            "backward": Culprit("mpi_impl/layers/mlp.py", 20, 23, "computation"),
            "step": Culprit("mpi_impl/training/optimizer.py", 34, 34, "scaling")}
SEED = "a seed that the answers of these tests do not know"


@cache
def solution(lab: str, variant: str = PUBLIC):
    """Return the instructor's notebook of a lab such as `lab1_collectives`, in the variant of a seed."""
    return notebook_of(SOURCES[lab], variant)


def released(lab: str) -> str:
    """Return the text of a lab's notebook as students get it."""
    return nbformat.writes(without_secrets(solution(lab)))


def marks_of(lab: str, seed: str = SEED, *, variant: str = PUBLIC, **answers: str) -> dict[str, Mark]:
    """Return the marks by check of the solution with these answers replaced. The ranks are kept for the next call."""
    source = solution(lab, variant) if variant != PUBLIC else solution(lab)     # tests replace `solution`
    CURRENT.clear()
    CURRENT.update(answers_of(source))
    assert not set(answers) - set(CURRENT), "there is no such answer"
    CURRENT.update(answers)
    with secret_draws(seed, CURRENT) as draws, pushed(HUNTED, PRACTICE):     # the bugs that lab 7's solution finds
        return {mark.check: mark for mark in marks(source, draws)}


def marks_in_a_notebook(lab: str, hidden: bool = False, **answers: str) -> dict[str, Mark]:
    """Return the marks with the public random numbers of a notebook, without hidden tests or with them."""
    seen = deepcopy(solution(lab))
    for cell in seen.cells:
        cell.source = cell.source if hidden else HIDDEN.sub("", cell.source)
    CURRENT.clear()
    CURRENT.update({**answers_of(seen), **answers})
    return {mark.check: mark for mark in marks(seen, Draws("", {}))}


def plant(lab: str, answer: str, *texts: str) -> dict[str, str]:
    """Return the solution of an answer with a mistake planted: texts, each of which must occur once, and new ones."""
    source = answers_of(solution(lab))[answer]
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {answer}"
        source = source.replace(old, new)
    return {answer: source}


def checks_of(names: str) -> set[str]:
    """Return the checks that are named without `check_`, as in "pass_on all_gather"."""
    return {f"check_{name}" for name in names.split()}


def lost_checks(found: dict[str, Mark]) -> set[str]:
    """Return the checks that gave no points."""
    return {name for name, mark in found.items() if mark.points < mark.of}
