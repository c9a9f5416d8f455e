"""Every lab: the solution has all 60 points, and what students get has none."""
import numpy as np
import pytest

from course.grading.answers import answers_of
from course.grading.expected import expected
from course.grading.release import without_secrets
from course.grading.stored import FOLDER, results_of
from course.grading.values import from_bytes
from course.tests.hostile import Submission
from course.tests.submissions import (HIDDEN, LAB8, LAB_NAMES, SOURCES, lost_checks, marks_in_a_notebook, marks_of,
                                      plant, solution)
from tests.deep import one_fast_of


@pytest.mark.parametrize("lab", one_fast_of(7, LAB_NAMES))
def test_the_solution_has_all_points(lab):
    """(A solution with one mistake loses that one's checks alone: test_mistakes.py.)"""
    found = marks_of(lab)
    assert lost_checks(found) == set() and sum(mark.of for mark in found.values()) == 60


@pytest.mark.parametrize("lab", one_fast_of(4, LAB_NAMES))
def test_the_solution_has_all_points_in_a_notebook(lab):
    """There, checks have no hidden tests, and draw public numbers."""
    assert lost_checks(marks_in_a_notebook(lab)) == set()


@pytest.mark.parametrize("lab", one_fast_of(4, LAB_NAMES))
def test_a_release_that_is_handed_in_as_it_is_has_none(lab):
    found = marks_of(lab, **answers_of(without_secrets(solution(lab))))
    assert lost_checks(found) == set(found) and not any(mark.points for mark in found.values())


@pytest.mark.deep
def test_a_run_that_does_not_learn_is_told_the_goal():
    slow = Submission(LAB8, plant(LAB8, "train", '"learning_rate": 0.3', '"learning_rate": 0.001'), "train",
                      "is the goal")
    assert slow.fault(slow.marks()) == ""


def numbers(value) -> np.ndarray:
    """Return all numbers of nested lists and dicts."""
    if not isinstance(value, dict | list | tuple):
        return np.ravel(value)
    return np.concatenate([numbers(one) for one in (value.values() if isinstance(value, dict) else value)])


@pytest.mark.parametrize("lab", one_fast_of(3, sorted(path.stem for path in FOLDER.glob("*.bin"))))
def test_students_get_results_of_whole_layers_and_not_the_functions(lab):
    """If a result is missing or has changed: python -m course.grading.expected."""
    now, stored = from_bytes(expected(SOURCES[lab])), results_of(lab)
    assert set(now) == set(stored) and all(np.allclose(numbers(now[key]), numbers(stored[key])) for key in now)
    assert not any("def whole_" in HIDDEN.sub("", cell.source) for cell in solution(lab).cells)
