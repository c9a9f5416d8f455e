"""The grades of a class, check by check:

    python -m course.grading.class_table lab1_collectives [--course FOLDER]

A row for each student, and below it each check with the share of the class that passed it: what the next class should
be about. Texts that no person has graded yet count as nothing, and are marked.
"""
from pathlib import Path
from typing import NamedTuple

import nbformat

from course.grading.grade import title
from course.grading.release import open_gradebook
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.tables import aligned
from reference.errors import UserError


class Score(NamedTuple):
    """A student's points for a check or a text."""

    points: float
    of: float
    waits: bool     # for a person


Class = dict[str, dict[str, Score]]     # by student, then by check


def main() -> None:
    parser = ArgumentParser(prog="course.grading.class_table", description="Print what a class got, check by check.")
    parser.add_argument("lab", metavar="LAB", help="as lab1_collectives")
    parser.add_argument("--course", default=Path(), metavar="FOLDER", type=Path,
                        help="the course (default: this folder)")
    options = parser.parse_args()
    scores = read_scores(options.course / "gradebook.db", options.lab)
    titles = read_titles(options.course / "source" / options.lab / f"{options.lab}.ipynb")
    print(table(scores, titles))


def read_scores(database: Path, lab: str) -> Class:
    """Read what nbgrader has stored of a lab. Raises UserError."""
    with open_gradebook(database) as gradebook:
        known = {assignment.name for assignment in gradebook.assignments}
        if lab not in known:
            raise UserError(f"The course has no lab {lab!r}, but {', '.join(sorted(known))}.")
        scores = {submission.student.id: {grade.name: Score(float(grade.score), float(grade.max_score),
                                                            bool(grade.needs_manual_grade))
                                          for notebook in submission.notebooks for grade in notebook.grades}
                  for submission in gradebook.assignment_submissions(lab)}
    if not scores:
        raise UserError(f"Nobody's {lab} has been graded yet: nbgrader autograde {lab} does it.")
    return scores


def read_titles(notebook: Path) -> dict[str, str]:
    """Return the title of each check and text, by name, in the lab's order."""
    return {cell.metadata.nbgrader.grade_id: title(cell.source) if cell.cell_type == "code" else "An answer in words"
            for cell in nbformat.read(notebook, as_version=4).cells if cell.metadata.get("nbgrader", {}).get("grade")}


def table(scores: Class, titles: dict[str, str]) -> str:
    """Return the table of students, and that of checks."""
    numbers = {name: str(n) for n, name in enumerate(titles, 1)}
    rows = [["student", *numbers.values(), "points"]]
    for student in sorted(scores):
        mine = scores[student]
        total = sum(score.points for score in mine.values())
        rows.append([student, *(shown(mine[name]) for name in numbers), f"{total:g}"])
    checks = [["", "check", "points", "passed by", "mean"]]
    for name, number in numbers.items():
        column = [mine[name] for mine in scores.values()]
        passed = sum(score.points == score.of for score in column)
        mean = sum(score.points for score in column) / len(column)
        checks.append([number, titles[name], f"{column[0].of:g}", f"{passed} of {len(column)}", f"{mean:.1f}"])
    waiting = sum(score.waits for mine in scores.values() for score in mine.values())
    footnote = f"\n\n? no person has graded this text yet ({waiting} in all)" if waiting else ""
    return f"{aligned(rows)}\n\n{aligned(checks, left=(1,))}{footnote}"


def shown(score: Score) -> str:
    return "?" if score.waits else f"{score.points:g}"


if __name__ == "__main__":
    run_alone(main)
