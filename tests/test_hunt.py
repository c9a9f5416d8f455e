"""A bug hunt: every student has a bug that their own run shows, and an answer is graded."""
from collections import Counter

from benchmarks.bug_matrix import hunt
from benchmarks.bug_matrix.hunt import Marks, grade, hunt_of, hunts, lines_of
from shardlab.programs.settings import parse
from tests.launching import ROOT, launch

STUDENTS = [f"student {i}" for i in range(100)]


def test_students_get_many_bugs_and_each_always_the_same_one():
    drawn = Counter(hunt_of(student).entry.name for student in STUDENTS)
    assert len(hunts()) > 90 and len(drawn) > 0.4 * len(hunts()) and max(drawn.values()) < 20
    assert [hunt_of(student) for student in STUDENTS[:9]] == [hunt_of(student) for student in STUDENTS[:9]]


def test_a_hunt_that_ends_changes_nobody_elses(monkeypatch):
    before = {student: hunt_of(student).entry.name for student in STUDENTS}
    gone, *others = hunts()
    monkeypatch.setattr(hunt, "hunts", lambda: tuple(others))
    changed = {name for student, name in before.items() if hunt_of(student).entry.name != name}
    assert changed <= {gone.entry.name}


def test_every_hunt_has_a_run_of_its_ranks():
    for _, ranks, options in hunts():
        parallel = parse(options, ranks).parallel
        assert parallel.world_size == ranks in range(2, 9)


def test_an_answer_is_graded():
    entry = hunt_of("alice").entry
    file, lines = entry.bug.file, lines_of(entry)
    source = (ROOT / file).read_text().splitlines()
    assert entry.bug.right.splitlines()[0] in source[lines.start - 1]
    assert grade("alice", file, lines.start, entry.kind) == Marks(True, True, True)
    assert grade("alice", f"./{file}", lines.stop, "memory") == Marks(True, False, False)
    assert grade("alice", "mpi_impl/launch/__main__.py", lines.start, entry.kind) == Marks(False, False, True)


def test_a_programs_tools_see_the_bug(tmp_path):
    (tmp_path / "text.txt").write_text("a bug hunts a rank, a rank hunts a bug. " * 500)
    data = ["--data-path", tmp_path / "text.txt", "--data-cache-path", tmp_path / "cache"]
    student = next(student for student in map("student {}".format, range(400))
                   if hunt_of(student).entry.name == "the norms' gradients not summed")
    _, ranks, options = hunt_of(student)
    program = "benchmarks.bug_matrix.hunt", student, "pretrain_gpt"
    done = launch(ranks, "-m", *program, *options, *data, "--train-iters", 2, "--verify")
    assert done.returncode and "the gradient of iteration 1 and that of one process differ by" in done.stderr
