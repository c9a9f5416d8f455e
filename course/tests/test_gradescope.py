"""Gradescope always gets its results, unless the instructor's own files are wrong."""
import json
import os
import subprocess
import sys
import zipfile
from io import BytesIO

import nbformat
import pytest

from course.grading.draws import SEED_FILE
from course.grading.gradescope import METADATA, main
from course.grading.hunts import FILE
from course.grading.release import autograder
from course.tests.notebooks import answer_cell, cell, check_cell, notebook
from course.tests.submissions import LAB1, PRACTICE, solution
from tests.launching import ROOT

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
    assert "There is no case for you" in bug("--student", "bob")


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
