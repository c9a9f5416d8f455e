"""Fill Canvas's gradebook with nbgrader's scores:

    python -m course.grading.canvas --roster EXPORT.csv --course FOLDER --output grades.csv

EXPORT.csv is what Canvas exports ("Export Entire Gradebook"). The same rows and columns come out, with the scores of
all labs that have a column there, ready for Canvas's "Import". The program lists who is missing on either side.
"""
import argparse
import csv
import io
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from course.grading.release import open_gradebook, write
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.files import check_writable, read_bytes
from reference.errors import UserError

KEYS = ("SIS Login ID", "SIS User ID", "ID")    # columns that may have nbgrader's names, the likeliest first
LARGEST = 64 << 20      # bytes of an export


class Lab(NamedTuple):
    """A lab in nbgrader's gradebook."""

    name: str
    of: float                       # its points
    scores: dict[str, float]        # by nbgrader's name of the student, less the penalty for late submissions


def main() -> None:
    parser = ArgumentParser(prog="course.grading.canvas", description="Fill Canvas's gradebook with nbgrader's scores.")
    parser.add_argument("--roster", required=True, metavar="EXPORT.csv", type=Path, help="the export of Canvas")
    parser.add_argument("--course", required=True, metavar="FOLDER", type=Path,
                        help="the course, with its gradebook.db")
    parser.add_argument("--output", required=True, metavar="FILE.csv", type=Path, help="the file to write, for Canvas")
    parser.add_argument("--column", action="append", default=[], type=parse_column, metavar="LAB=COLUMN",
                        help='the column of a lab, if its title does not begin with the lab\'s number, as in --column '
                             '"lab1_collectives=Homework A (123)"')
    options = parser.parse_args()
    rows = read_roster(options.roster)
    check_writable(str(options.output))
    if options.output.exists() and options.output.samefile(options.roster):
        raise UserError(f"{options.output} is what --roster reads: give --output another name.")
    found = read_gradebook(options.course / "gradebook.db")
    for sentence in fill(rows, found, dict(options.column)):
        print(sentence)
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows(rows)
    write(options.output.absolute(), text.getvalue().encode())
    print(f"{options.output} is written: look at it, and import it into Canvas.")


def parse_column(text: str) -> tuple[str, str]:
    """Parse 'LAB=COLUMN'. Raises ArgumentTypeError."""
    lab, sign, column = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form LAB=COLUMN")
    return lab, column


def read_roster(path: Path) -> list[list[str]]:
    """Read the rows of Canvas's export, each with as many cells as the first. Raises UserError."""
    try:
        text = read_bytes(str(path), LARGEST).decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file in UTF-8 ({error}). Export it from Canvas again.") from error
    missing = [name for name in ("Student", "ID") if not rows or name not in rows[0]]
    if missing:
        raise UserError(f"{path} is not an export of Canvas's gradebook: its first row names no column "
                        f"{missing[0]}. In Canvas, choose Export Entire Gradebook.")
    return [row + [""] * (len(rows[0]) - len(row)) for row in rows if row]


def read_gradebook(database: Path) -> list[Lab]:
    """Read the labs and scores that nbgrader has stored. Raises UserError."""
    with open_gradebook(database) as gradebook:
        return [Lab(assignment.name, float(assignment.max_score),
                    {found.student.id: max(0.0, float(found.score) - float(found.late_submission_penalty or 0))
                     for found in assignment.submissions})
                for assignment in sorted(gradebook.assignments, key=lambda one: one.name)]


def fill(rows: list[list[str]], labs: list[Lab], columns: dict[str, str]) -> list[str]:
    """Write the scores into the rows. Return sentences for the instructor."""
    if unknown := set(columns) - {lab.name for lab in labs}:
        known = ", ".join(lab.name for lab in labs)
        raise UserError(f"--column names {sorted(unknown)[0]}, but the course has {known}.")
    students = {student for lab in labs for student in lab.scores}
    place, said = match_students(rows, students), []
    for lab in labs:
        if not lab.scores:
            said.append(f"{lab.name} has not been graded yet.")
            continue
        column = find_column(rows[0], lab.name, columns.get(lab.name))
        if column is None:
            said.append(f"{lab.name} has no column in Canvas: make an assignment \"{title(lab.name)}\" there, or name "
                        "its column with --column.")
            continue
        said += compare_points(rows, column, lab)
        for row, student in place.items():
            if student in lab.scores:
                rows[row][column] = f"{lab.scores[student]:g}"
        count = sum(student in lab.scores for student in place.values())
        scores = "score" if count == 1 else "scores"
        said.append(f"{lab.name}: {count} {scores} into the column \"{rows[0][column]}\".")
        said += [f"{name(rows[row])} has submitted nothing for {lab.name}: the cell stays as it was."
                 for row, student in place.items() if student not in lab.scores]
    said += [f"{name(rows[row])} is in Canvas, but not in nbgrader's gradebook: the row stays as it was."
             for row in student_rows(rows) if row not in place]
    return said + [f"{student} is in nbgrader's gradebook, but not in Canvas's export: no row has this "
                   f"{' or '.join(KEYS)}." for student in sorted(students - set(place.values()))]


def student_rows(rows: list[list[str]]) -> list[int]:
    """Return the indices of the students' rows. Canvas puts points and postings before them, a test student after."""
    at = rows[0].index("ID")
    return [i for i, row in enumerate(rows) if i > 0 and row[at].strip() and name(row) != "Student, Test"]


def match_students(rows: list[list[str]], students: set[str]) -> dict[int, str]:
    """Map the index of a row to its student in nbgrader."""
    found: dict[int, str] = {}
    for at in [rows[0].index(key) for key in KEYS if key in rows[0]]:
        left = students - set(found.values())
        found |= {i: rows[i][at].strip() for i in student_rows(rows) if i not in found and rows[i][at].strip() in left}
    return dict(sorted(found.items()))


def find_column(header: list[str], lab: str, named: str | None) -> int | None:
    """Return the column of a lab: the one named by --column, else the one with its name or number. Raises UserError."""
    titles = [re.sub(r"\s*\(\d+\)$", "", whole).strip() for whole in header]
    if named is not None:
        fitting = [i for i, whole in enumerate(header) if named in (whole, titles[i])]
        if not fitting:
            raise UserError(f"--column names \"{named}\", but Canvas's export has no such column.")
    else:
        wanted = re.compile(rf"{re.escape(title(lab))}\b(?!\.\d).*", re.IGNORECASE)
        fitting = [i for i, short in enumerate(titles) if short == lab or wanted.fullmatch(short)]
    if len(fitting) > 1:
        raise UserError(f"{lab} could be \"{header[fitting[0]]}\" or \"{header[fitting[1]]}\": choose one with "
                        f"--column \"{lab}={header[fitting[0]]}\".")
    return fitting[0] if fitting else None


def title(lab: str) -> str:
    """Return 'Lab 1' for lab1_collectives."""
    found = re.match(r"lab(\d+)", lab)
    return f"Lab {found[1]}" if found else lab


def compare_points(rows: list[list[str]], column: int, lab: Lab) -> list[str]:
    """Return a sentence if a lab's column has other points in Canvas than the lab in nbgrader."""
    for row in rows[1:]:
        if name(row) == "Points Possible":
            with suppress(ValueError):      # a column without points
                if float(row[column]) != lab.of:
                    return [f"{lab.name} has {lab.of:g} points, but \"{rows[0][column]}\" has {row[column].strip()} in "
                            "Canvas: change one of them."]
    return []


def name(row: list[str]) -> str:
    return row[0].strip()


if __name__ == "__main__":
    run_alone(main)
