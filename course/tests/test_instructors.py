"""The instructors' pages: each class and each written question has all that it should, and what they quote exists."""
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from nbgrader.apps.nbgraderapp import NbGraderApp

from course.grading.bundle import ROOT
from course.grading.lab_source import labs
from shardlab.command import program_of

PAGES = {path.stem: path.read_text() for path in (ROOT / "course" / "instructors").rglob("*.md")}
HEADINGS = ["After this, students can", "What goes wrong in their heads", "On the board", "75 minutes", "To open",
            "To close", "Material"]
COMMAND = re.compile(r"`((?:\.venv/bin/)?(?:python|shardlab|nbgrader) [^`]+|\./run\.sh [^`]+)`")
SAMPLES = re.compile(r"^\*\*(?:Excellent \(5\)|Insufficient \([\d.]+\))\.\*\*\n\n((?:> .+\n)+)\nWhy: ", re.MULTILINE)
QUESTION = re.compile(r"^## (?:First|Second): `(\w+)`$", re.MULTILINE)


@pytest.mark.parametrize("unit", [name for name in PAGES if name[:2].isdigit()])
def test_a_class_has_all_its_parts_and_takes_75_minutes(unit):
    assert re.findall("^## (.+)$", PAGES[unit], re.MULTILINE) == HEADINGS
    minutes = PAGES[unit].partition("## 75 minutes")[2].partition("## To open")[0]
    assert sum(map(int, re.findall(r"^\| (\d+) \|", minutes, re.MULTILINE))) == 75


@pytest.mark.parametrize("lab", labs(), ids=lambda lab: lab.stem)
def test_each_written_question_has_a_rubric_of_its_points_and_two_samples(lab):
    _, *parts = QUESTION.split(PAGES[lab.stem.partition("_")[0]])
    asked = re.findall(r'writing="(\w+)" points=(\d+)', lab.read_text())
    assert parts[::2] == [name for name, _ in asked]
    for rubric, (_, points) in zip(parts[1::2], asked, strict=True):
        assert sum(map(float, re.findall(r"^\| ([\d.]+) \|", rubric, re.MULTILINE))) == int(points)
        good, bad = SAMPLES.findall(rubric)
        assert len(bad.split()) < len(good.replace(">", "").split()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tells_you_to_run_exists(page):
    for line in COMMAND.findall(PAGES[page]):
        program, word, *rest = words = shlex.split(line)
        if Path(program).name == "python":
            assert all(find_spec(words[i + 1]) for i, option in enumerate(words) if option == "-m"), line
        elif program == "./run.sh":
            assert f"\n    {word}) " in (ROOT / "run.sh").read_text(), line
        else:
            assert word in NbGraderApp.subcommands if program == "nbgrader" else program_of([word, *rest]), line
