"""Gradescope and Classroom 50 always get their results, unless the instructor's own files are wrong."""
import json
import os
import subprocess
import sys
import zipfile
from io import BytesIO

import nbformat
import pytest

from course.grading.classroom50 import FIELDS
from course.grading.draws import SEED_FILE
from course.grading.gradescope import METADATA, main
from course.grading.hunts import FILE
from course.grading.release import autograder, public_autograder
from course.tests.notebooks import answer_cell, cell, check_cell, notebook
from course.tests.submissions import LAB1, LAB3, LAB7, PRACTICE, released, solution
from tests.launching import ROOT

# ---- Gradescope ----

SOURCE = notebook(answer_cell("one", "def one():\n    return 1"), check_cell("seen", """
# It is one
from course.grading import expect, run
expect(run(None, "one").results == [1], "it is not one")
"""), check_cell("hidden", """
# It is one, still
### BEGIN HIDDEN TESTS
expect(run(None, "one").results == [1], "it is not one, still")
### END HIDDEN TESTS
""", 7))
WRONG = notebook(answer_cell("one", "def one():\n    return 2"))


@pytest.fixture
def grade_one(monkeypatch, tmp_path):
    """Return a function that grades a submission, handed in as a file or in a folder, and returns results.json."""
    (tmp_path / "submission").mkdir()
    nbformat.write(SOURCE, tmp_path / "lab.ipynb")

    def grade(submission=None, *options, folder=True):
        path = tmp_path / "submission" / "lab.ipynb"
        if submission is not None:
            path.write_text(submission if isinstance(submission, str) else nbformat.writes(submission))
        arguments = [tmp_path / "lab.ipynb", path.parent if folder else path, tmp_path / "results" / "results.json",
                     *options]
        monkeypatch.setattr(sys, "argv", ["gradescope", *map(str, arguments)])
        main()
        assert os.listdir(tmp_path / "results") == ["results.json"]
        return json.loads((tmp_path / "results" / "results.json").read_text())
    return grade


def test_the_solution_has_all_points(grade_one):
    right = {"status": "passed", "output": "", "visibility": "visible"}
    assert grade_one(SOURCE, folder=False) == {
        "output": "12 of 12 points.", "visibility": "visible", "stdout_visibility": "hidden", "tests": [
            {"name": "It is one", "score": 5, "max_score": 5, **right},
            {"name": "It is one, still", "score": 7, "max_score": 7, **right}]}


def test_a_wrong_answer_has_none_and_its_hidden_tests_are_shown_when_the_instructor_says(grade_one):
    found = grade_one(WRONG, "--hidden-tests", "after_due_date")
    assert [(test["score"], test["status"], test["output"], test["visibility"]) for test in found["tests"]] == [
        (0, "failed", "it is not one", "visible"), (0, "failed", "it is not one, still", "after_due_date")]
    assert "points" not in found["output"], "the sum would tell what is hidden"


def draws(grade_one, tmp_path, draw: str, imports: str):
    """Let the lab have one check, which prints what `draw` returns; return a function that grades it."""
    source = notebook(cell("locked", "tools", imports), answer_cell("f", ""), check_cell("check", f"print({draw})"))
    (tmp_path / "lab.ipynb").write_text(nbformat.writes(source))
    return lambda *options: grade_one(source, *options)["tests"][0]["output"]


def test_the_checks_draw_from_the_seed_of_a_file_or_from_a_new_one(grade_one, tmp_path):
    drawn = draws(grade_one, tmp_path, "check_data('x').integers(10 ** 9)", "from course.grading import check_data")
    (tmp_path / "seed").write_text("mine\n")
    seed = "--seed-file", str(tmp_path / "seed")
    assert drawn(*seed) == drawn(*seed) != drawn() != drawn()


def test_the_bugs_are_those_of_the_student_whom_gradescope_names(grade_one, tmp_path):
    bug = draws(grade_one, tmp_path, "culprit('step').kind", "from course.grading.hunts import culprit")
    (tmp_path / FILE).write_text(json.dumps({"a@b.c": {level: bug._asdict() for level, bug in PRACTICE.items()}}))
    for text in None, "{", '{"users": [{"email": "a@b.c", "name": "Alice"}]}':
        if text is not None:
            (tmp_path / METADATA).write_text(text)
        assert (bug() == PRACTICE["step"].kind + "\n") == ("a@b.c" in str(text))
    (tmp_path / METADATA).write_text('{"users": [{"email": "bob"}]}')
    assert "There is no case for you" in bug()


def test_the_zip_runs_where_gradescope_puts_it(tmp_path):
    """But for the environment, which here is this one."""
    data = autograder(LAB1, solution(LAB1), {SEED_FILE: "my seed\n"})
    assert data == autograder(LAB1, solution(LAB1), {SEED_FILE: "my seed\n"})
    source = tmp_path / "source"
    for folder in ("source", "submission", "results"):
        (tmp_path / folder).mkdir()
    with zipfile.ZipFile(BytesIO(data)) as archive:
        archive.extractall(source)
        executable = {entry.filename for entry in archive.infolist() if entry.external_attr >> 16 & 0o100}
    assert executable == {"setup.sh", "run_autograder"} and (source / SEED_FILE).read_text() == "my seed\n"
    assert subprocess.run(["bash", "-n", source / "setup.sh"]).returncode == 0
    needed, pins = ((source / name).read_text() for name in ("requirements.txt", "constraints.txt"))
    assert all(f"\n{name}==" in f"\n{pins}" for name in needed.split()) and "--hash" not in pins
    (source / ".venv").symlink_to(sys.prefix)
    (tmp_path / "submission" / "x.ipynb").write_text("{")
    done = subprocess.run(["bash", source / "run_autograder"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "AUTOGRADER": str(tmp_path)})
    assert done.returncode == 0 and str(ROOT) not in done.stderr, done.stderr
    found = json.loads((tmp_path / "results" / "results.json").read_text())
    assert "not JSON" in found["output"] and len(found["tests"]) > 3


# ---- Classroom 50: students may read its autograder ----

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
