"""Gradescope always gets its results, unless the instructor's own files are wrong."""
import json
import os
import re
import subprocess
import sys
import zipfile

import nbformat
import pytest

from grading.draws import SEED_FILE
from grading.gradescope import METADATA, VISIBILITIES, main
from grading.hunts import FILE
from grading.lab_source import labs, notebook_of
from grading.release import autograder
from reference.errors import UserError
from tests.labs.notebooks import answer_cell, cell, check_cell, notebook
from tests.labs.submissions import PRACTICE
from tests.launching import ROOT

SOURCE = notebook(answer_cell("one", "def one():\n    return 1"), check_cell("seen", """
# It is one
from grading import expect, run
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

    def grade(submission=None, *options, name="lab.ipynb", folder=True, source="lab.ipynb"):
        path = tmp_path / "submission" / name
        if submission is not None:
            path.write_text(submission if isinstance(submission, str) else nbformat.writes(submission))
        arguments = [tmp_path / source, path.parent if folder else path, tmp_path / "results" / "results.json",
                     *options]
        monkeypatch.setattr(sys, "argv", ["gradescope", *map(str, arguments)])
        main()
        assert os.listdir(tmp_path / "results") == ["results.json"]
        return json.loads((tmp_path / "results" / "results.json").read_text())
    return grade


@pytest.mark.parametrize("folder", [True, False])
def test_the_solution_has_all_points(grade_one, folder):
    assert grade_one(SOURCE, folder=folder) == {
        "output": "12 of 12 points.", "visibility": "visible", "stdout_visibility": "hidden", "tests": [
            {"name": "It is one", "score": 5, "max_score": 5, "status": "passed", "output": "",
             "visibility": "visible"},
            {"name": "It is one, still", "score": 7, "max_score": 7, "status": "passed", "output": "",
             "visibility": "visible"}]}


def test_a_wrong_answer_has_none_and_is_reported_why(grade_one):
    found = grade_one(WRONG)
    assert [(test["score"], test["status"], test["output"]) for test in found["tests"]] == [
        (0, "failed", "it is not one"), (0, "failed", "it is not one, still")]


def test_the_checks_draw_from_the_seed_of_a_file_or_of_a_new_one_that_is_printed_for_the_instructor(grade_one, tmp_path,
                                                                                                    capsys):
    source = notebook(answer_cell("f", ""), check_cell("check", "print(check_data('x').integers(10 ** 9))"))
    source.cells.insert(0, cell("locked", "tools", "from grading import check_data"))
    (tmp_path / "lab.ipynb").write_text(nbformat.writes(source))
    (tmp_path / "seed").write_text("mine\n")

    def drawn(*options):
        found = grade_one(source, *options)
        printed = re.findall(r"No seed was given: .* one, (\w+)", capsys.readouterr().out)
        assert "seed" not in str(found)
        return found["tests"][0]["output"], printed

    mine, printed = drawn("--seed-file", str(tmp_path / "seed"))
    assert printed == [] and drawn("--seed-file", str(tmp_path / "seed")) == (mine, [])
    new, (seed,) = drawn()
    (tmp_path / "seed").write_text(seed)
    assert drawn("--seed-file", str(tmp_path / "seed")) == (new, []) and new != mine
    with pytest.raises(UserError, match="none cannot be read"):
        grade_one(source, "--seed-file", str(tmp_path / "none"))


def test_the_bugs_are_those_of_the_student_whom_gradescope_names(grade_one, tmp_path):
    source = notebook(answer_cell("f", ""), check_cell("check", "print(culprit('step').kind)"))
    source.cells.insert(0, cell("locked", "tools", "from grading.hunts import culprit"))
    (tmp_path / "lab.ipynb").write_text(nbformat.writes(source))
    (tmp_path / FILE).write_text(json.dumps({"a@b.c": {level: bug._asdict() for level, bug in PRACTICE.items()}}))
    assert "There is no case for you" in grade_one(source)["tests"][0]["output"]
    (tmp_path / METADATA).write_text('{"users": [{"email": "a@b.c", "name": "Alice"}]}')
    assert grade_one(source)["tests"][0]["output"] == PRACTICE["step"].kind + "\n"
    assert "There is no case for you" in grade_one(source, "--student", "bob")["tests"][0]["output"]


@pytest.mark.parametrize("visibility", VISIBILITIES)
def test_hidden_tests_are_shown_when_the_instructor_says(grade_one, visibility):
    found = grade_one("{}", "--hidden-tests", visibility)
    assert [test["visibility"] for test in found["tests"]] == ["visible", visibility]
    assert ("0 of 12 points" in found["output"]) == (visibility == "visible"), "the sum would tell what is hidden"


@pytest.mark.parametrize("text, words", [("", "is empty"), ("{", "not JSON"), ("[]", "has no cells"),
                                         (None, "There is no notebook"), ('{"cells": []}', "another lab")])
def test_a_broken_submission_has_results_too(grade_one, text, words):
    found = grade_one(text)
    assert words in found["output"] and all(test["score"] == 0 and words in test["output"] for test in found["tests"])


@pytest.mark.parametrize("folder, words", [(True, "There is no notebook"), (False, "is a link")])
def test_a_link_to_the_instructors_notebook_has_no_points(grade_one, tmp_path, folder, words):
    (tmp_path / "submission" / "lab.ipynb").symlink_to(tmp_path / "lab.ipynb")
    assert words in (found := grade_one(folder=folder))["output"] and not any(one["score"] for one in found["tests"])


def test_another_name_is_taken_if_there_is_no_choice(grade_one):
    assert grade_one(SOURCE, name="mine.ipynb")["tests"][0]["score"] == 5
    assert "2 notebooks" in grade_one(SOURCE, name="too.ipynb")["output"]


@pytest.mark.parametrize("text, words", [(None, "cannot be read"), ("{", "is not a notebook"),
                                         (nbformat.writes(WRONG), "no checks")])
def test_a_wrong_source_is_a_sentence_of_the_instructors(grade_one, tmp_path, text, words):
    if text is not None:
        (tmp_path / "source.ipynb").write_text(text)
    with pytest.raises(UserError, match=words):
        grade_one(SOURCE, source="source.ipynb")


def test_the_zip_runs_where_gradescope_puts_it(tmp_path):
    """But for the environment, which here is this one."""
    lab = labs()[0]
    data = autograder(lab.stem, notebook_of(lab), {SEED_FILE: "my seed\n"})
    assert data == autograder(lab.stem, notebook_of(lab), {SEED_FILE: "my seed\n"})
    for folder in ("source", "submission", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lab.zip").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "lab.zip") as archive:
        archive.extractall(tmp_path / "source")
        executable = {entry.filename for entry in archive.infolist() if entry.external_attr >> 16 & 0o100}
    assert executable == {"setup.sh", "run_autograder"}
    assert subprocess.run(["bash", "-n", tmp_path / "source" / "setup.sh"]).returncode == 0
    needed, pins = ((tmp_path / "source" / name).read_text() for name in ("requirements.txt", "constraints.txt"))
    assert all(f"\n{name}==" in f"\n{pins}" for name in needed.split()) and "--hash" not in pins
    (tmp_path / "source" / ".venv").symlink_to(sys.prefix)
    assert (tmp_path / "source" / SEED_FILE).read_text() == "my seed\n"
    (tmp_path / "submission" / "x.ipynb").write_text("{")
    done = subprocess.run(["bash", tmp_path / "source" / "run_autograder"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "AUTOGRADER": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results" / "results.json").read_text())
    assert "not JSON" in found["output"] and len(found["tests"]) > 3
    assert str(ROOT) not in done.stderr
