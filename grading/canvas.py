"""Fill Canvas's gradebook with nbgrader's scores:

    python -m grading.canvas --roster EXPORT.csv --course FOLDER --output grades.csv

EXPORT.csv is what Canvas exports ("Export Entire Gradebook"). The same rows and columns come out, with the scores of
those labs that have a column in it, ready for Canvas's "Import". Who is missing on either side is told.
"""
import argparse
import csv
import io
import re
from pathlib import Path
from typing import NamedTuple

from grading.release import opened, write
from mpi_impl.launching.entry import ArgumentParser, run_alone
from reference.errors import UserError

KEYS = ("SIS Login ID", "SIS User ID", "ID")    # what nbgrader's name of a student may be, the likeliest first


class Lab(NamedTuple):
    name: str
    of: float
    scores: dict[str, float]        # by nbgrader's name of the student, less what being late costs


def main() -> None:
    parser = ArgumentParser(prog="grading.canvas", description="Fill Canvas's gradebook with nbgrader's scores.")
    parser.add_argument("--roster", required=True, metavar="EXPORT.csv", type=Path, help="what Canvas has exported")
    parser.add_argument("--course", required=True, metavar="FOLDER", type=Path,
                        help="the course, with its gradebook.db")
    parser.add_argument("--output", required=True, metavar="FILE.csv", type=Path, help="what is written, for Canvas")
    parser.add_argument("--column", action="append", default=[], type=named, metavar="LAB=COLUMN",
                        help='as in --column "lab1_collectives=Homework A (123)", for a column without the number of '
                             'the lab')
    options = parser.parse_args()
    if options.output.exists() and options.output.samefile(options.roster):
        raise UserError(f"{options.output} is what --roster reads: give --output another name.")
    rows, found = read_roster(options.roster), read_gradebook(options.course / "gradebook.db")
    for sentence in fill(rows, found, dict(options.column)):
        print(sentence)
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows(rows)
    write(options.output.absolute(), text.getvalue().encode())
    print(f"{options.output} is written: look at it, and import it into Canvas.")


def named(text: str) -> tuple[str, str]:
    lab, sign, column = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LAB=COLUMN")
    return lab, column


def read_roster(path: Path) -> list[list[str]]:
    """Read the rows of Canvas's export. Raises UserError."""
    try:
        rows = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file in UTF-8 ({error}). Export it from Canvas again.") from error
    missing = [name for name in ("Student", "ID") if not rows or name not in rows[0]]
    if missing:
        raise UserError(f"{path} is not an export of Canvas's gradebook: its first row names no column "
                        f"{missing[0]}. In Canvas, choose Export Entire Gradebook.")
    return rows


def read_gradebook(database: Path) -> list[Lab]:
    """Read what nbgrader has graded. Raises UserError."""
    if not database.is_file():
        raise UserError(f"There is no {database}: --course names the folder that ./run.sh labs has made.")
    with opened(database) as gradebook:
        return [Lab(assignment.name, float(assignment.max_score),
                    {found.student.id: max(0.0, float(found.score) - float(found.late_submission_penalty or 0))
                     for found in assignment.submissions})
                for assignment in sorted(gradebook.assignments, key=lambda one: one.name)]


def fill(rows: list[list[str]], labs: list[Lab], columns: dict[str, str]) -> list[str]:
    """Write the scores into the rows. Return what the instructor should know, in sentences."""
    if unknown := set(columns) - {lab.name for lab in labs}:
        known = ", ".join(lab.name for lab in labs)
        raise UserError(f"--column names {sorted(unknown)[0]}, but the course has {known}.")
    students = {student for lab in labs for student in lab.scores}
    place, said = places(rows, students), []
    for lab in labs:
        if not lab.scores:
            said.append(f"{lab.name} has not been graded yet.")
            continue
        column = column_of(rows[0], lab.name, columns.get(lab.name))
        if column is None:
            said.append(f"{lab.name} has no column in Canvas: make an assignment \"{number(lab.name)}\" there, or name "
                        "its column with --column.")
            continue
        said += differing_points(rows, column, lab)
        for row, student in place.items():
            if student in lab.scores:
                rows[row] += [""] * (column + 1 - len(rows[row]))
                rows[row][column] = f"{lab.scores[student]:g}"
        count = sum(student in lab.scores for student in place.values())
        scores = "score" if count == 1 else "scores"
        said.append(f"{lab.name}: {count} {scores} into the column \"{rows[0][column]}\".")
        said += [f"{name(rows[row])} has handed in nothing for {lab.name}: the cell stays as it was."
                 for row, student in place.items() if student not in lab.scores]
    said += [f"{name(rows[row])} is in Canvas, but not in nbgrader's gradebook: the row stays as it was."
             for row in of_students(rows) if row not in place]
    return said + [f"{student} is in nbgrader's gradebook, but not in Canvas's export: no row has this "
                   f"{' or '.join(KEYS)}." for student in sorted(students - set(place.values()))]


def of_students(rows: list[list[str]]) -> list[int]:
    """Return the numbers of the rows that belong to students. Points and postings come first, a test student last."""
    at = rows[0].index("ID")
    return [i for i, row in enumerate(rows)
            if i > 0 and len(row) > at and row[at].strip() and name(row) != "Student, Test"]


def places(rows: list[list[str]], students: set[str]) -> dict[int, str]:
    """Map rows to their students in nbgrader."""
    found: dict[int, str] = {}
    for key in KEYS:
        if key not in rows[0]:
            continue
        at, taken = rows[0].index(key), set(found.values())
        for i in of_students(rows):
            student = rows[i][at].strip() if len(rows[i]) > at else ""
            if i not in found and student in students - taken:
                found[i] = student
    return dict(sorted(found.items()))


def column_of(header: list[str], lab: str, said: str | None) -> int | None:
    """Return the column of a lab: the one that was named, or that has its name or number. Raises UserError."""
    titles = [re.sub(r"\s*\(\d+\)$", "", title).strip() for title in header]
    if said is not None:
        fitting = [i for i, title in enumerate(header) if said in (title, titles[i])]
        if not fitting:
            raise UserError(f"--column names \"{said}\", but Canvas's export has no such column.")
    else:
        wanted = re.compile(rf"{re.escape(number(lab))}\b(?!\.\d).*", re.IGNORECASE)
        fitting = [i for i, title in enumerate(titles) if title == lab or wanted.fullmatch(title)]
    if len(fitting) > 1:
        raise UserError(f"{lab} could be \"{header[fitting[0]]}\" or \"{header[fitting[1]]}\": say which with "
                        f"--column \"{lab}={header[fitting[0]]}\".")
    return fitting[0] if fitting else None


def number(lab: str) -> str:
    """Return 'Lab 1' for lab1_collectives."""
    found = re.match(r"lab(\d+)", lab)
    return f"Lab {found[1]}" if found else lab


def differing_points(rows: list[list[str]], column: int, lab: Lab) -> list[str]:
    for row in rows[1:]:
        if row and row[0].strip() == "Points Possible" and len(row) > column:
            try:
                same = float(row[column]) == lab.of
            except ValueError:
                same = True
            if not same:
                return [f"{lab.name} has {lab.of:g} points, but \"{rows[0][column]}\" has {row[column].strip()} in "
                        "Canvas: change one of them."]
    return []


def name(row: list[str]) -> str:
    return row[0].strip()


if __name__ == "__main__":
    run_alone(main)
