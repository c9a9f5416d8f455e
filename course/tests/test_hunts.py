"""Bugs that students hunt: each has others, nobody can find out which without the secret, and answers are graded."""
import json
import sys
from collections import Counter

import pytest

from course.grading.answers import CURRENT, answers_of
from course.grading.draws import SEED_FILE, secret_draws
from course.grading.grade import marks
from course.grading.hunts import FILE, KINDS, LEVELS, Culprit, hunted_by, read
from course.hunts.__main__ import about, deal, main, page
from course.hunts.catalogue import FILE as CATALOGUE, drawn_cases, try_drawn
from course.hunts.faults import answer_of, drawn_faults, level_of, probable_level
from course.hunts.trial import Evidence, Trials
from course.tests.notebooks import notebook
from course.tests.submissions import LAB7, PRACTICE, SEED, solution
from reference.errors import UserError
from tests.planted import buggy_codes
from tests.small_pools import SmallPools

STUDENTS = [f"student {i}" for i in range(60)]
MINE = PRACTICE["forward"]
RIGHT = {"file": MINE.file, "line": MINE.first, "kind": MINE.kind}


@pytest.fixture(scope="module")
def forward_case():
    """Return a notebook with the forward case of lab 7 alone."""
    wanted = "tools", "case_tools", "case_forward"
    return notebook(*(cell for cell in solution(LAB7).cells
                      if cell.metadata.get("nbgrader", {}).get("grade_id", "").removeprefix("check_").startswith(wanted)
                      and cell.cell_type == "code"))


@pytest.fixture
def key(tmp_path):
    """Write a course's file: alice has the solution's bugs, bob has others."""
    other = Culprit("mpi_impl/layers/block.py", 7, 9, "scaling")
    (tmp_path / FILE).write_text(json.dumps({
        "alice": {level: culprit._asdict() for level, culprit in PRACTICE.items()},
        "bob": {level: other._asdict() for level in LEVELS}}))
    return tmp_path / FILE


def marks_of_case(case, key, student: str, answer: str):
    CURRENT.clear()
    CURRENT.update({**answers_of(case), "case_forward": answer})
    with secret_draws(SEED, CURRENT) as draws, hunted_by([student], key):
        return {mark.check.removeprefix("check_case_forward_"): mark for mark in marks(case, draws)}


def returning(value) -> str:
    return f"def case_forward():\n    return {value!r}\n"


@pytest.mark.parametrize("student, answer, points, words", [
    ("alice", RIGHT, 10, "the form is right"),
    ("bob", RIGHT, 0, "is not in mpi_impl/comm/regions.py"),
    ("carol", RIGHT, 0, "There is no case for you"),
    ("alice", RIGHT | {"line": MINE.last + 1}, 4, f"Line {MINE.last + 1} of {MINE.file} is as it was"),
    ("alice", RIGHT | {"kind": "aliasing"}, 8, "has no bug of the kind 'aliasing'"),
    ("alice", RIGHT | {"line": list(range(999))}, 0, "the number of a line"),
    ("alice", {"file": MINE.file}, 0, "a dict with file, line, kind")])
def test_an_answer_is_graded_for_the_student_who_gives_it(forward_case, key, student, answer, points, words):
    found = marks_of_case(forward_case, key, student, returning(answer))
    assert sum(mark.points for mark in found.values()) == points
    assert any(words in mark.said for mark in found.values()), found


THIEF = """
import sys

def case_forward():
    '''Look for the bugs where the grader has them.'''
    for name, module in list(sys.modules.items()):
        if name == "course.grading.hunts" and module.HUNTED:
            return dict(zip(("file", "line", "end", "kind"), module.HUNTED[-1]["forward"]))
    with open("hunts.json") as file:
        return eval(file.read())
"""


def test_an_answer_cannot_look_its_bug_up(forward_case, key, monkeypatch):
    monkeypatch.chdir(key.parent)
    assert all(mark.points == 0 for mark in marks_of_case(forward_case, key, "alice", THIEF).values())


def test_a_broken_file_of_hunts_is_a_sentence_of_the_instructors(tmp_path):
    assert read(tmp_path / "none") == {}
    for text in ("{", '{"alice": {"forward": {}}}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UserError, match="is not a file of hunts"):
            read(tmp_path / FILE)


# ---- who hunts what ----


class DrawnTrials:
    """Trials in which every second mutant shows where its name says, and no run is needed."""

    def __init__(self):
        self.tried = []

    def runs(self, fault):
        return True

    def of(self, fault):
        self.tried.append(fault.name)
        return None if len(self.tried) % 2 else Evidence(probable_level(fault), "it printed", "", "it differs")


def test_a_course_draws_numbers_that_only_its_secret_tells_each_with_a_kind_that_an_answer_can_name():
    mine, others = ({(fault.bug.wrong, fault.lines) for fault in drawn_faults(secret).values()} for secret in "ab")
    assert len(mine & others) < len(mine) / 20
    for fault in list(drawn_faults("a").values())[::20]:
        assert buggy_codes(fault.bug) and fault.kind in KINDS and fault.lines[0] <= fault.lines[1]


def test_a_catalogue_resumes_and_changes_other_lines_first_and_gives_a_page_and_a_key_for_grading(
        tmp_path, monkeypatch, capsys):
    def hunts(*students):
        monkeypatch.setattr(sys, "argv", ["hunts", "--course", str(tmp_path), *students])
        main()

    (tmp_path / SEED_FILE).write_text("secret\n")
    first, second = DrawnTrials(), DrawnTrials()
    try_drawn(first, tmp_path, 4, most=4)
    with pytest.raises(UserError, match="too few cases that nobody has yet; missing: .*[45] backward"):
        hunts(*STUDENTS[:5])
    try_drawn(second, tmp_path, 4, most=10 ** 6)
    assert len(first.tried) == 4 and not set(first.tried) & set(second.tried)
    cases = drawn_cases(tmp_path, "secret")
    assert Counter(evidence.level for evidence in cases.values()) == dict.fromkeys(LEVELS, 4)
    assert len({answer_of(fault) for fault in cases}) == 12 and "forward 4 of 4" in capsys.readouterr().out

    (tmp_path / "roster").write_text("alice\n\n b/ob@x.y\na b\na_b\n")
    hunts("--roster", str(tmp_path / "roster"))
    found, text = read(tmp_path / FILE), (tmp_path / FILE).read_text()
    assert set(found) == {"alice", "b/ob@x.y", "a b", "a_b"}
    assert {path.name for path in (tmp_path / "hunts").iterdir()} == {
        "alice.md", "b%2f.ob@x.y.md", "a%20.b.md", "a_b.md"}
    shown = (tmp_path / "hunts" / "alice.md").read_text()
    assert all(f"The {level} case" in shown and case["name"] not in shown and case["file"] not in shown
               for level, case in json.loads(text)["alice"].items())
    hunts("alice")
    assert (tmp_path / FILE).read_text() == text, "the same again, and the others are kept"
    (tmp_path / CATALOGUE).write_text("[]")
    with pytest.raises(UserError, match="is not a file of hunts: .*course.hunts.catalogue"):
        drawn_cases(tmp_path, "secret")


def test_no_two_of_60_students_share_a_case_and_late_ones_change_nobodys():
    faults = list(drawn_faults("secret").values())[:183]
    cases = {fault: Evidence(LEVELS[i % 3], "", "", "") for i, fault in enumerate(faults)}
    dealt = deal(cases, "secret", STUDENTS, {})
    names = [fault.name for mine in dealt.values() for fault, _ in mine.values()]
    assert len(names) == len(set(names)) == 180
    known = {student: {level: about(fault) for level, (fault, _) in mine.items()} for student, mine in dealt.items()}
    later = deal(cases, "secret", ["late", STUDENTS[7]], known)
    assert later[STUDENTS[7]] == dealt[STUDENTS[7]]
    assert not {fault.name for fault, _ in later["late"].values()} & set(names)
    with pytest.raises(UserError, match="missing: 1 forward, 1 backward, 1 step"):
        deal(cases, "secret", ["late", "later"], known)


@pytest.mark.deep
def test_a_drawn_mutant_is_tried_on_ranks_and_its_page_does_not_name_it(tmp_path):
    fault = next(fault for name, fault in drawn_faults("secret").items()
                 if "mlp_backward" in name and fault.kind == "scaling")
    with SmallPools() as pools:
        trials = Trials(pools, tmp_path)
        evidence = trials.of(fault)
        assert trials.runs(fault) and evidence and evidence.level == "backward"
    first = next(line for line in evidence.compared.splitlines() if line.startswith("  iteration 1, "))
    assert level_of(first.strip().replace("iteration ", "", 1).replace(",", "")) == "backward"
    text = page("alice", {"backward": (fault, evidence)})
    assert not any(secret in text for secret in (fault.bug.right, fault.bug.wrong, fault.name))
    assert "--record" in text and "iteration     10/10" in evidence.printed
