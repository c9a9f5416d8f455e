"""Classroom 50 always gets its results, from an autograder that students may read."""
import json
import os
import subprocess
import sys

import nbformat
import pytest

from course.grading.classroom50 import FIELDS
from course.grading.release import public_autograder
from course.tests.submissions import LAB1, LAB3, LAB7, released, solution
from tests.launching import ROOT

ENVIRONMENT = {name: f"the {field}" for field, name in FIELDS.items()}


@pytest.fixture
def push(tmp_path):
    """Return a function that grades a checkout with these files, as Classroom 50 does: result.json, and the page."""
    (checkout := tmp_path / "checkout").mkdir()

    def grade(lab: str, **files: str) -> tuple[dict, str]:
        for name, data in public_autograder(lab, released(lab), {}).items():
            (tmp_path / name).write_bytes(data)
        for name, text in files.items():
            (path := checkout / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py" if path.name in ("pip", "course") else ".ipynb").write_text(text)
        done = subprocess.run([sys.executable, tmp_path / "autograder.py"], cwd=checkout, capture_output=True,
                              text=True, timeout=300,
                              env=os.environ | ENVIRONMENT | {"PIP_NO_INDEX": "1", "PYTHONPATH": ""})
        assert done.returncode == 0 and str(ROOT) not in done.stderr, done.stderr
        return json.loads((checkout / "result.json").read_text()), (checkout / "release-body.md").read_text()
    return grade


@pytest.mark.parametrize("lab, place", [(LAB3, "notebooks__labs__"), (LAB7, "")])
def test_a_solution_has_all_points(push, lab, place):
    """Lab 3 compares with stored results, and what lab 7 hunts is known to nobody here."""
    result, page = push(lab, **{f"{place}{lab}": nbformat.writes(solution(lab))})
    assert (result["score"], result["max-score"]) == (60, 60) == tuple(
        sum(test[of] for test in result["tests"]) for of in ("score", "max-score"))
    assert result["schema"] == "classroom50/result/v1" and result["commit"] == "the commit"
    assert all(type(test["score"]) is int and test["passed"] for test in result["tests"])
    assert page.startswith("60 of 60 points.")


def test_an_empty_submission_has_none_and_says_why(push):
    result, page = push(LAB1)
    assert result["score"] == 0 and result["max-score"] == 60 and "There is no notebook" in page
    assert len(result["tests"]) > 3 and not any(test["passed"] for test in result["tests"])


def test_a_students_modules_are_never_imported(push):
    result, _ = push(LAB1, pip="raise SystemExit(9)", course="raise SystemExit(9)",
                     lab1_collectives=nbformat.writes(solution(LAB1)))
    assert result["score"] == 60
