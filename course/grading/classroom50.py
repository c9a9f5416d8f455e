"""Grade one submission for Classroom 50: `python -m course.grading.classroom50 LAB.ipynb CHECKOUT`.

It writes CHECKOUT/result.json, which Classroom 50 collects, and release-body.md, which the student reads. Classroom 50
publishes an autograder on a web page, so this one has no secrets: LAB.ipynb is the students' notebook, with the checks
that they see and the random numbers of a notebook. The format is that of foundation50/classroom50, wiki page Advanced
Autograding, in October 2026.
"""
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from course.grading.draws import PUBLIC
from course.grading.gradescope import read_source
from course.grading.submission import Graded, grade_file
from course.grading.writing import quote
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.files import write_whole

FIELDS = {"classroom": "CLASSROOM", "assignment": "ASSIGNMENT", "submission": "SUBMISSION_TAG", "commit": "COMMIT_URL",
          "release": "RELEASE_URL", "review": "REVIEW_URL"}      # of result.json, from the environment
BUNDLE = Path("notebooks", "labs")      # where the students' bundle has its labs


def main() -> None:
    parser = ArgumentParser(prog="course.grading.classroom50", description="Grade one submission.")
    parser.add_argument("source", metavar="LAB.ipynb", type=Path, help="the students' notebook, as it was handed out")
    parser.add_argument("checkout", metavar="CHECKOUT", type=Path, help="the folder of the student's repository")
    options = parser.parse_args()
    folder = options.checkout / BUNDLE if (options.checkout / BUNDLE).exists() else options.checkout
    graded = grade_file(read_source(options.source), folder, options.source.name, PUBLIC)
    write_whole(str(options.checkout / "result.json"), json.dumps(result_of(graded), indent=1))
    write_whole(str(options.checkout / "release-body.md"), page_of(graded))


def result_of(graded: Graded) -> dict:
    """Return the contents of result.json. Classroom 50 adds whose it is."""
    return {"schema": "classroom50/result/v1", **{field: os.environ.get(name, "") for field, name in FIELDS.items()},
            "datetime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "score": round(graded.points),
            "max-score": round(graded.of),
            "tests": [{"test-name": mark.title, "passed": mark.points == mark.of, "score": round(mark.points),
                       "max-score": round(mark.of)} for mark in graded.marks]}


def page_of(graded: Graded) -> str:
    """Return the page for the student: points and messages."""
    checks = (f"**{mark.title}**: {mark.points:g} of {mark.of:g}\n\n{quote(mark.said)}\n" for mark in graded.marks)
    return "\n".join([f"{graded.points:g} of {graded.of:g} points. {' '.join(graded.remarks)}\n", *checks])


if __name__ == "__main__":
    run_alone(main)
