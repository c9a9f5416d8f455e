"""Canvas's gradebook comes back with the scores where they belong, and with nothing lost."""
import csv
import io
import os

import pytest
from hypothesis import given, strategies as st

from grading.canvas import Lab, fill, find_column, main, read_roster
from grading.release import open_gradebook
from reference.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")     # nbgrader's own

HEADER = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Lab 1 (12345)", "Lab 2: parallel block (12346)",
          "Final"]
LABS = [Lab("lab1_collectives", 60, {"alice": 52.5, "s2": 60, "3": 0}), Lab("lab2_parallel_block", 60, {"alice": 41})]


def rows_of(*rows):
    return [list(HEADER), ["", "", "", "", "", "Manual Posting", "", ""],
            ["    Points Possible", "", "", "", "", "60", "60", "(read only)"], *map(list, rows)]


ALICE = ["Liddell, Alice", "1", "s1", "alice", "A", "", "", "99"]
BOB = ["B, Bob", "2", "s2", "bob", "A", "7", "", ""]
CLEO = ["C, Cleo", "3", "", "", "A", "", "", ""]
NOBODY = ["N, N", "4", "s4", "n", "A", "5", "6", ""]
TEST = ["Student, Test", "1", "", "alice", "A", "", "", ""]


def test_scores_go_where_the_login_else_the_user_else_the_number_says():
    rows = rows_of(ALICE, BOB, CLEO, NOBODY, TEST)
    said = fill(rows, LABS, {})
    assert [row[5:7] for row in rows[3:]] == [["52.5", "41"], ["60", ""], ["0", ""], ["5", "6"], ["", ""]]
    assert said == [
        'lab1_collectives: 3 scores into the column "Lab 1 (12345)".',
        'lab2_parallel_block: 1 score into the column "Lab 2: parallel block (12346)".',
        "B, Bob has submitted nothing for lab2_parallel_block: the cell stays as it was.",
        "C, Cleo has submitted nothing for lab2_parallel_block: the cell stays as it was.",
        "N, N is in Canvas, but not in nbgrader's gradebook: the row stays as it was."]


def test_who_is_in_nbgrader_alone_is_reported_and_what_is_not_graded():
    rows = rows_of(NOBODY)
    said = fill(rows, [*LABS, Lab("lab3_x", 10, {})], {})
    strangers = [line.split(" is in nbgrader's")[0] for line in said if "but not in Canvas's" in line]
    assert strangers == ["3", "alice", "s2"]
    assert "lab3_x has not been graded yet." in said and rows == rows_of(NOBODY)


def test_one_student_of_nbgrader_fills_the_rows_of_the_likeliest_name_alone():
    """A number that is another's login is not taken for it."""
    rows = rows_of(*([name, number, "", login, "", "", "", ""] for name, number, login in ("A7x", "B87", "C97")))
    fill(rows, [Lab("lab1", 60, {"7": 1})], {})
    assert [row[5] for row in rows[3:]] == ["", "1", "1"]


@given(st.lists(st.tuples(st.text(max_size=5), st.sampled_from("1234"), st.text(max_size=3),
                          st.sampled_from(["alice", "s2", ""]))),
       st.sets(st.sampled_from(["alice", "s2", "1", "2", "5"])))
def test_no_row_is_lost_or_moved_and_no_other_cell_changes(people, students):
    before = rows_of(*([*person, "A", "old", "", "x"] for person in people))
    rows = [list(row) for row in before]
    fill(rows, [Lab("lab1", 60, {student: 3 for student in students})], {})
    assert len(rows) == len(before) and rows[:3] == before[:3]
    for new, old in zip(rows, before):
        assert new[:5] + new[6:] == old[:5] + old[6:]
        assert new[5] == old[5] or (new[5] == "3" and set(new[1:4]) & students)


@pytest.mark.parametrize("titles, lab, place", [
    (["Lab 1"], "lab1_x", 0), (["lab 1. Collectives (1)"], "lab1_x", 0), (["Lab 10", "Lab 1"], "lab1_x", 1),
    (["Lab 10"], "lab1_x", None),
    (["Lab 1.5"], "lab1_x", None), (["Lab 2"], "lab1_x", None), (["lab1_x (3)"], "lab1_x", 0),
    (["My lab (5)"], "My lab", 0),
    (["Homework: Lab 1"], "lab1_x", None), ([], "lab1_x", None),
])
def test_the_column_of_a_lab(titles, lab, place):
    assert find_column(titles, lab, None) == place


def test_a_column_can_be_named_and_must_be_where_two_would_do():
    header = ["Lab 1 (1)", "Lab 1: again (2)", "Homework (3)"]
    with pytest.raises(UserError, match='could be "Lab 1 .1." or "Lab 1: again'):
        find_column(header, "lab1_x", None)
    assert find_column(header, "lab1_x", "Lab 1: again (2)") == 1 and find_column(header, "lab1_x", "Homework") == 2
    with pytest.raises(UserError, match="has no such column"):
        find_column(header, "lab1_x", "none")
    with pytest.raises(UserError, match="names lab9, but the course has lab1_c"):
        fill(rows_of(), LABS, {"lab9": "x"})


def test_other_points_in_canvas_are_reported():
    rows = rows_of(ALICE)
    rows[2][5] = "100"
    said = fill(rows, LABS, {})
    assert 'lab1_collectives has 60 points, but "Lab 1 (12345)" has 100 in Canvas: change one of them.' in said


@pytest.mark.parametrize("data, words", [
    (b"", "names no column Student"), (b"a,b\n", "names no column Student"), (b"Student,Name\n", "names no column ID"),
    (b'Student,ID\n"x', "not a CSV file"),
    (b"Student,ID\n\xff", "not a CSV file"), (b"\0", "no"), (None, "cannot be read"), ("a pipe", "a pipe")])
def test_a_wrong_roster_is_a_sentence(tmp_path, data, words):
    path = tmp_path / "roster.csv"
    if data == "a pipe":
        os.mkfifo(path)
    elif data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=words):
        read_roster(path)


def run(monkeypatch, tmp_path, *more):
    options = ["--roster", tmp_path / "roster.csv", "--course", tmp_path, "--output", tmp_path / "out.csv", *more]
    monkeypatch.setattr("sys.argv", ["canvas", *map(str, options)])
    main()


def test_from_file_to_file(monkeypatch, tmp_path, capsys):
    """With nbgrader's own gradebook, names that need quotes, short rows, and a byte order mark."""
    rows = [*rows_of(ALICE, ['O"Neil, Ünal\nthe second', "2", "s2"]), []]
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows(rows)
    (tmp_path / "roster.csv").write_text(text.getvalue(), encoding="utf-8-sig", newline="")
    with pytest.raises(UserError, match="There is no .*gradebook.db: --course names"):
        run(monkeypatch, tmp_path)
    with open_gradebook(tmp_path / "gradebook.db") as gradebook:
        gradebook.add_assignment("lab1")
        gradebook.add_notebook("lab1", "lab1")
        gradebook.add_grade_cell("check", "lab1", "lab1", max_score=60, cell_type="code")
        for student, score, penalty in (("alice", 50, 4.5), ("s2", 1, 3)):
            gradebook.add_student(student)
            gradebook.add_submission("lab1", student)
            gradebook.find_grade("check", "lab1", "lab1", student).auto_score = score
            gradebook.find_submission_notebook("lab1", "lab1", student).late_submission_penalty = penalty
        gradebook.db.commit()
    run(monkeypatch, tmp_path)
    found = list(csv.reader(io.StringIO((tmp_path / "out.csv").read_text(encoding="utf-8"), newline="")))
    assert found[3][5] == "45.5" and found[4] == [*rows[4], "", "",
                                                  "0"] and found[5:] == [[]] and len(found) == len(rows)
    with pytest.raises(UserError, match="give --output another name"):
        run(monkeypatch, tmp_path, "--output", tmp_path / "roster.csv")
    (tmp_path / "gradebook.db").write_bytes(b"no database" * 100)
    with pytest.raises(UserError, match="is not a gradebook of nbgrader's"):
        run(monkeypatch, tmp_path)
    (tmp_path / "gradebook.db").unlink()
    os.mkfifo(tmp_path / "gradebook.db")
    with pytest.raises(UserError, match="gradebook.db cannot be read"):
        run(monkeypatch, tmp_path)
    with pytest.raises(UserError, match="none.csv cannot be read"):
        run(monkeypatch, tmp_path, "--roster", tmp_path / "none.csv")
    assert "out.csv is written" in capsys.readouterr().out
