"""Grade one submission for Gradescope: `python -m course.grading.gradescope SOURCE.ipynb SUBMISSION RESULTS.json`.

SOURCE is the instructor's notebook, SUBMISSION a notebook or its folder, RESULTS the file that Gradescope reads. Every
submission gets results, whatever is in it. The exit status is not 0 only if something else is wrong.
"""
import json
from contextlib import suppress
from pathlib import Path

import nbformat

from course.grading.answers import about
from course.grading.draws import SEED_FILE, read_seed
from course.grading.grade import Mark, no_marks
from course.grading.hunts import FILE, hunted_by
from course.grading.submission import LARGEST, Graded, grade_file
from course.grading.writing import names_of_texts
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.files import check_folder, check_writable, read_text, write_whole
from reference.errors import UserError

METADATA = "submission_metadata.json"       # which Gradescope puts beside the folder of the submission
VISIBILITIES = ("visible", "hidden", "after_due_date", "after_published")


def main() -> None:
    parser = ArgumentParser(prog="course.grading.gradescope",
                            description="Grade one submission, and write results.json.")
    parser.add_argument("source", metavar="SOURCE.ipynb", type=Path, help="the instructor's notebook")
    parser.add_argument("submission", metavar="SUBMISSION", type=Path, help="a notebook, or the folder that holds it")
    parser.add_argument("results", metavar="RESULTS.json", type=Path, help="the file to write")
    parser.add_argument("--hidden-tests", choices=VISIBILITIES, default="visible",
                        help="when students see the message of a check with hidden tests (default: %(default)s)")
    parser.add_argument("--seed-file", metavar="FILE", type=Path, help=f"the course's {SEED_FILE}, from which the "
                        "checks' random numbers come (default: a new seed, which is printed)")
    options = parser.parse_args()
    source = read_source(options.source)
    seed = read_seed(options.seed_file) if options.seed_file else None
    check_folder(str(options.results.absolute().parent))
    check_writable(str(options.results))
    hidden = {about(cell)["grade_id"] for cell in source.cells if "BEGIN HIDDEN TESTS" in cell.source}
    with hunted_by(names_of_student(options.submission), (options.seed_file or options.source).with_name(FILE)):
        graded = grade_file(source, options.submission, options.source.name, seed)
    if texts := names_of_texts(source):
        graded.remarks.append(f"A person grades {' and '.join(texts)}, for more points.")
    results = results_of(graded, hidden, options.hidden_tests)
    write_whole(str(options.results), json.dumps(results, indent=1))
    print(results["output"])


def names_of_student(submission: Path) -> list[str]:
    """Return the names by which the course may know the student: Gradescope's."""
    about = submission.absolute().parent / METADATA
    with suppress(UserError, ValueError, TypeError, AttributeError, KeyError):      # no file, or another one
        return [str(user[key]) for user in json.loads(read_text(str(about), LARGEST))["users"]
                for key in ("email", "sid", "name", "id") if user.get(key)]
    return []


def read_source(path: Path):
    """Read the instructor's notebook. Raises UserError."""
    text = read_text(str(path), LARGEST)
    try:
        source = nbformat.reads(text, as_version=4)
    except Exception as error:      # nbformat raises many kinds
        raise UserError(f"{path} is not a notebook ({type(error).__name__}). Make it with ./run.sh labs.") from error
    if not no_marks(source, ""):
        raise UserError(f"{path} has no checks: it should be the instructor's notebook, made with ./run.sh labs.")
    return source


def results_of(graded: Graded, hidden: set[str], visibility: str) -> dict:
    """Return the contents of Gradescope's results.json, without the total if students may not see every check."""
    total = f"{graded.points:g} of {graded.of:g} points." if visibility == "visible" else "The lab has been graded."
    return {"output": " ".join([total, *graded.remarks]), "visibility": "visible", "stdout_visibility": "hidden",
            "tests": [test_of(mark, visibility if mark.check in hidden else "visible") for mark in graded.marks]}


def test_of(mark: Mark, visibility: str) -> dict:
    """Return the entry of one check in results.json."""
    return {"name": mark.title, "score": mark.points, "max_score": mark.of, "output": mark.said,
            "status": "passed" if mark.points == mark.of else "failed", "visibility": visibility}


if __name__ == "__main__":
    run_alone(main)
