"""Every lab: the solution has all 60 points, and a blank submission none."""
import pytest

from grading.answers import answers_of
from grading.lab_source import LABS
from tests.deep import one_fast_of
from tests.labs.submissions import lost_checks, marks_in_a_notebook, marks_of, solution

LAB_NAMES = sorted(path.stem for path in LABS.glob("lab*.py"))


@pytest.mark.parametrize("lab", LAB_NAMES)
def test_the_solution_has_all_points(lab):
    found = marks_of(lab)
    assert lost_checks(found) == set() and sum(mark.of for mark in found.values()) == 60


@pytest.mark.parametrize("lab", one_fast_of(3, LAB_NAMES))
def test_the_solution_has_all_points_in_a_notebook(lab):
    """There, checks have no hidden tests, and draw public numbers."""
    assert lost_checks(marks_in_a_notebook(lab)) == set()


@pytest.mark.parametrize("lab", one_fast_of(4, LAB_NAMES))
def test_a_blank_submission_has_none(lab):
    found = marks_of(lab, **{name: "raise NotImplementedError()" for name in answers_of(solution(lab))})
    assert lost_checks(found) == set(found)
