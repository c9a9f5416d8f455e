"""Canvas's gradebook comes back with the scores where they belong, and with nothing lost."""
import pytest
from hypothesis import given, strategies as st

from course.grading.canvas import Lab, fill, find_column, main, read_roster
from reference.errors import UserError

HEADER = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Lab 1 (12345)", "Lab 2: parallel block (12346)",
          "Final"]
LABS = [Lab("lab1_collectives", 60, {"alice": 52.5, "s2": 60, "3": 0}), Lab("lab2_parallel_block", 60, {"alice": 41})]


def rows_of(*rows):
    return [list(HEADER), ["", "", "", "", "", "Manual Posting", "", ""],
            ["    Points Possible", "", "", "", "", "60", "100", "(read only)"], *map(list, rows)]


ALICE = ["Liddell, Alice", "1", "s1", "alice", "A", "", "", "99"]
BOB = ["B, Bob", "2", "s2", "bob", "A", "7", "", ""]
CLEO = ["C, Cleo", "3", "", "", "A", "", "", ""]
NOBODY = ["N, N", "s2", "s4", "n", "A", "5", "6", ""]        # whose number is another's name
TEST = ["Student, Test", "1", "", "alice", "A", "", "", ""]


def test_scores_go_where_the_login_else_the_user_else_the_number_says():
    rows = rows_of(ALICE, BOB, CLEO, NOBODY, TEST)
    said = fill(rows, [*LABS, Lab("lab3_x", 10, {"eve": 1}), Lab("lab4_x", 10, {})], {})
    assert [row[5:7] for row in rows[3:]] == [["52.5", "41"], ["60", ""], ["0", ""], ["5", "6"], ["", ""]]
    for sentence, words in zip(said, [
            'lab1_collectives: 3 scores into the column "Lab 1 (12345)"', "lab2_parallel_block has 60 points, but",
            "lab2_parallel_block: 1 score into", "B, Bob has submitted nothing for lab2_parallel_block",
            "C, Cleo has submitted nothing for lab2", "lab3_x has no column", "lab4_x has not been graded",
            "N, N is in Canvas, but not", "eve is in nbgrader's gradebook, but not"], strict=True):
        assert sentence.startswith(words)


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


@pytest.mark.parametrize("titles, place", [
    (["lab 1. Collectives (1)"], 0), (["Lab 10", "Lab 1"], 1), (["Lab 1.5", "Homework: Lab 1"], None)])
def test_the_column_of_a_lab(titles, place):
    assert find_column(titles, "lab1_x", None) == place


TWO = ["Lab 1 (1)", "Lab 1: again (2)", "Homework (3)"]


def test_a_column_can_be_named():
    assert [find_column(TWO, "lab1_x", named) for named in ("Lab 1: again (2)", "Homework")] == [1, 2]
    with pytest.raises(UserError, match="could be"):
        find_column(TWO, "lab1_x", None)
    with pytest.raises(UserError, match="no such column"):
        find_column(TWO, "lab1_x", "none")
    with pytest.raises(UserError, match="--column names lab9"):
        fill(rows_of(), LABS, {"lab9": "x"})


@pytest.mark.parametrize("data, words", [(b"a,b\n", "no column Student"), (b'Student,ID\n"x', "not a CSV file"),
                                         (b"Student,ID\n\xff", "not a CSV file")])
def test_a_wrong_roster_gets_a_sentence(tmp_path, data, words):
    (tmp_path / "roster.csv").write_bytes(data)
    with pytest.raises(UserError, match=words):
        read_roster(tmp_path / "roster.csv")


@pytest.mark.parametrize("output, database, words", [
    ("roster.csv", b"", "--output"), ("out.csv", None, "--course"),
    ("out.csv", b"no database" * 100, "not a gradebook")])
def test_wrong_files_are_named_by_their_option(monkeypatch, tmp_path, output, database, words):
    """(With right ones: test_nbgrader.py.)"""
    (tmp_path / "roster.csv").write_text("Student,ID\n")
    if database is not None:
        (tmp_path / "gradebook.db").write_bytes(database)
    options = ["--roster", tmp_path / "roster.csv", "--course", tmp_path, "--output", tmp_path / output]
    monkeypatch.setattr("sys.argv", ["canvas", *map(str, options)])
    with pytest.raises(UserError, match=words):
        main()
