"""Through nbgrader itself: the solution has all points, and whatever else is handed in ends nobody's grading."""
import csv
import json
import os
import re
from html import unescape

import nbformat
import pytest
from nbgrader.converters import Autograde, GenerateFeedback
from nbgrader.coursedir import CourseDirectory
from nbgrader.utils import capture_log
from traitlets.config import PyFileConfigLoader

from course.grading import canvas, nbgrader_checks
from course.grading.answers import answers_of
from course.grading.class_table import read_scores, read_titles, table
from course.grading.draws import SEED_FILE, read_seed
from course.grading.hunts import FILE as HUNTS_FILE, HUNTED
from course.grading.lab_source import labs
from course.grading.release import make_course, open_gradebook
from course.grading.submission import grade_file
from course.tests.submissions import LAB1, PRACTICE

FILE = f"{LAB1}.ipynb"

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")     # nbgrader's own


def convert(kind, course):
    """Run a step of nbgrader for all students; return its log."""
    config = PyFileConfigLoader("nbgrader_config.py", path=str(course)).load_config()
    config.CourseDirectory.root, config.CourseDirectory.assignment_id = str(course), LAB1
    outcome = capture_log(kind(coursedir=CourseDirectory(config=config), config=config))
    assert outcome["success"], outcome
    return outcome.get("log", "")


def with_oddities(solution, marker):
    """Return the solution with duplicated, renamed and missing cells, old metadata and more; one cell makes the file
    `marker` if it is run.
    """
    cells = [json.loads(json.dumps(cell)) for cell in solution.cells]
    kept = [cell for cell in cells if not cell["metadata"].get("nbgrader", {}).get("grade")]
    for cell in kept:
        cell["metadata"].get("nbgrader", {})["schema_version"] = 0
    first = next(cell for cell in kept if cell["metadata"].get("nbgrader", {}).get("solution"))
    lone = {**first, "source": "def one(): pass", "metadata": {"nbgrader": {"grade_id": "\ud800", "solution": True}}}
    trace = {"cell_type": "code", "source": f"open({str(marker)!r}, 'w')", "metadata": {},
             "outputs": [{"output_type": "x"}]}
    script = {"cell_type": "markdown", "source": "<script>alert(1)</script>", "metadata": {}}
    check = {"cell_type": "code", "source": trace["source"],
             "metadata": {"nbgrader": {"grade_id": "check_pass_on", "grade": True, "locked": True, "points": 1000}}}
    renamed = {**first, "source": first["source"].replace("pass_on", "<b>", 1).replace("%%answer <b>", "%%answer xs_b")}
    return json.dumps({"cells": [check, trace, script, first, *kept, renamed, lone], "metadata": 3, "nbformat": 4})


def link_secrets(course, submitted):
    """Put links to the course's secrets into a submission, and a pipe that nobody writes to."""
    (submitted / FILE).symlink_to(course / "source" / LAB1 / FILE)
    (submitted / "seed.txt").symlink_to(course / SEED_FILE)
    (submitted / "more").mkdir()
    (submitted / "more" / "lab.txt").symlink_to(f"../../../../source/{LAB1}/{FILE}")
    (submitted / "all").symlink_to(course / "source")
    os.mkfifo(submitted / "timestamp.txt")


GRADED_WITH: list = []


def grade_and_note(*args):
    """Grade a submission, and note the seed, which is the last argument, and the bugs that the student hunts."""
    GRADED_WITH.append((args[-1], HUNTED[-1]))
    return grade_file(*args)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """Make a course whose students hand in all kinds of files; grade it and write feedback."""
    folder = tmp_path_factory.mktemp("courses") / "course"
    make_course(folder, labs()[:1])
    solution = (folder / "source" / LAB1 / FILE).read_text()
    handed_in = {
        "alice": {FILE: solution}, "bob": {FILE: (folder / "release" / LAB1 / FILE).read_text(), "notes.txt": "mine"},
        "odd": {FILE: with_oddities(nbformat.reads(solution, 4), folder / "it_was_run"), "timestamp.txt": "yesterday"},
        "broken": {FILE: "{"},
        "nothing": {"lab.txt": ""}, "sly": {"mine.txt": "mine"},
    }
    (folder / HUNTS_FILE).write_text(json.dumps({"alice": {level: bug._asdict() for level, bug in PRACTICE.items()}}))
    for student, files in handed_in.items():
        (folder / "submitted" / student / LAB1).mkdir(parents=True)
        for name, text in files.items():
            (folder / "submitted" / student / LAB1 / name).write_text(text)
    link_secrets(folder, folder / "submitted" / "sly" / LAB1)
    (folder / "submitted" / "slyer").mkdir()
    (folder / "submitted" / "slyer" / LAB1).symlink_to(folder / "source" / LAB1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nbgrader_checks, "grade_file", grade_and_note)
        convert(Autograde, folder)
    convert(GenerateFeedback, folder)
    return folder


@pytest.fixture(scope="module")
def grades(course):
    """Return the scores in nbgrader's gradebook."""
    with open_gradebook(course / "gradebook.db") as gradebook:
        return {found.student_id: found.score for found in gradebook.assignment_submissions(LAB1)}


def feedback(course, student: str) -> str:
    html = (course / "feedback" / student / LAB1 / f"{LAB1}.html").read_text()
    assert "<script>alert" not in html
    return re.sub(r"\s+", " ", unescape(re.sub(r"<(style|script).*?</\1>|<[^>]+>", "", html, flags=re.DOTALL)))


def test_each_has_the_points_that_he_or_she_should(grades):
    assert grades == {"alice": 60, "bob": 0, "odd": 60, "broken": 0, "sly": 0, "slyer": 0}


@pytest.mark.parametrize("student, words", {
    "alice": "passed: pass_on on 2 and 4 ranks", "bob": "NotImplementedError",
    "broken": f"{FILE} is not a notebook: it is not JSON",
    "odd": "The answer pass_on is there 2 times: the last one counts. xs_b is no task of this lab: "
           "has the first line of its cell been changed? ? is no task of this lab",
}.items())
def test_feedback_says_why(course, student, words):
    assert words in feedback(course, student)


def test_the_table_of_a_class_has_every_score_and_counts_who_passed_each_check(course, grades):
    scores, titles = read_scores(course / "gradebook.db", LAB1), read_titles(course / "source" / LAB1 / FILE)
    assert {student: sum(one.points for one in mine.values()) for student, mine in scores.items()} == grades
    text = table(scores, titles)
    for student, points in grades.items():
        assert re.search(rf"^{student} .* {points:g}$", text, re.MULTILINE)
    for name, title in titles.items():
        passed = sum(mine[name].points == mine[name].of for mine in scores.values())
        assert re.search(rf"^ *\d+  {re.escape(title)} .* {passed} of {len(scores)} ", text, re.MULTILINE)


def test_scores_come_into_canvas_less_what_was_late(course, monkeypatch, tmp_path):
    """From and to a file, with a byte order mark, names that need quotes, and short rows."""
    with open_gradebook(course / "gradebook.db") as gradebook:
        gradebook.find_submission_notebook(LAB1, LAB1, "odd").late_submission_penalty = 4.5
        gradebook.db.commit()
    rows = [["Student", "ID", "SIS Login ID", "Lab 1 (7)"], ['O"Neil, Ünal\nthe second', "1", "odd"], ["B", "2", "bob"]]
    with open(tmp_path / "in.csv", "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows(rows)
    monkeypatch.setattr("sys.argv", ["canvas", "--roster", str(tmp_path / "in.csv"), "--course", str(course),
                                     "--output", str(tmp_path / "out.csv")])
    canvas.main()
    with open(tmp_path / "out.csv", encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [rows[0], [*rows[1], "55.5"], [*rows[2], "0"]]


def test_feedback_lists_checks_by_their_titles_and_needs_no_network_for_formulas(course):
    page = (course / "feedback" / "bob" / LAB1 / f"{LAB1}.html").read_text()
    assert ">Test cell<" not in page and page.count("All-gather: ") >= 1 and "<math " in page
    text = re.sub(r"<(script|style|pre|code)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"\$[^$\n]*\\[a-z]+", text), "a formula in TeX"


def test_feedback_has_no_hidden_test(course):
    hidden = re.findall(r"### BEGIN HIDDEN TESTS\n(.*?)\n### END", "\n".join(
        cell.source for cell in nbformat.read(course / "source" / LAB1 / FILE, 4).cells), re.DOTALL)
    said = feedback(course, "bob")
    assert hidden and not [text for text in hidden if re.sub(r"\s+", " ", text) in said] and "HIDDEN" not in said


def test_nothing_of_a_submission_was_run_or_changed(course):
    assert not (course / "it_was_run").exists()
    assert (course / "submitted" / "broken" / LAB1 / FILE).read_text() == "{"


def test_all_were_graded_with_the_courses_seed_which_no_student_sees_and_their_own_bugs(course):
    seed = read_seed(course / SEED_FILE)
    assert [GRADED_WITH.count((seed, bugs)) for bugs in (PRACTICE, {})] == [1, len(GRADED_WITH) - 1] == [1, 5]
    shown = [path for part in ("release", "autograded", "feedback") for path in (course / part).rglob("*.*")]
    assert len(shown) > 6 and not any(path.is_file() and seed in path.read_text() for path in shown)


def test_links_of_a_submission_are_not_followed_and_its_files_come_back(course):
    solution = (course / "source" / LAB1 / FILE).read_text()
    for part in ("autograded", "feedback"):
        found = {path.name: path.read_text() for path in (course / part / "sly").rglob("*") if path.is_file()}
        assert found["mine.txt"] == "mine" and not {"seed.txt", "lab.txt"} & set(found)
        assert solution not in found.values() and not any("BEGIN SOLUTION" in text for text in found.values())
    assert (course / "source" / LAB1 / FILE).read_text() == solution


@pytest.mark.parametrize("data", [b"\xff", b"nonsense", b"9" * 99, b"9 " * 10 ** 6, b"0001-01-01 +99:99"])
def test_a_timestamp_that_is_no_time_is_none(tmp_path, data):
    (tmp_path / "timestamp.txt").write_bytes(data)
    assert nbgrader_checks.timestamp_of(CourseDirectory(), str(tmp_path)) is None
    (tmp_path / "timestamp.txt").write_text("2027-02-12 23:59:00 CET")
    assert nbgrader_checks.timestamp_of(CourseDirectory(), str(tmp_path)).year == 2027


def test_the_answers_are_in_what_was_graded(course):
    """So that a person can read them there, beside the marks."""
    graded = nbformat.read(course / "autograded" / "alice" / LAB1 / FILE, 4)
    assert answers_of(graded) == answers_of(nbformat.read(course / "source" / LAB1 / FILE, 4))
