"""`run_given`: a function that a lab gives as text runs as an answer does, and is no answer."""
import numpy as np
import pytest

from grading import CheckFailed, each, run_given
from grading.answers import CURRENT

SUM = """
def total(group, x):
    return group.all_reduce(x)
"""


def test_a_given_function_runs_on_ranks_though_there_are_no_answers():
    CURRENT.clear()
    outcome = run_given(SUM, 3, "total", each([np.full(2, 1.0), np.full(2, 2.0), np.full(2, 4.0)]))
    assert [list(found) for found in outcome.results] == [[7, 7]] * 3
    assert CURRENT == {}


def test_it_is_limited_as_an_answer_is():
    with pytest.raises(CheckFailed, match="may not be used here"):
        run_given(SUM, 2, "total", np.ones(2), allow=("send",))
    with pytest.raises(CheckFailed, match="may not be imported"):
        run_given("def f():\n    import reference", None, "f")


def test_what_it_raises_is_reported_with_its_lines():
    with pytest.raises(CheckFailed, match="1 / 0"):
        run_given("def f():\n    return 1 / 0", None, "f")
