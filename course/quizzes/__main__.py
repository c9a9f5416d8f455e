"""Write the quizzes: `python -m course.quizzes [--format gift|qti|notebook] [--variant SEED] [FOLDER]`.

    FOLDER/prerequisites.*      before the course
    FOLDER/concepts.*           the concept inventory: before it, and after
    FOLDER/exam.*               exam questions, of this variant

.gift is for Moodle, .ipynb for students, and .zip (QTI 1.2) for Canvas: text2qti makes it of the .txt beside it, which
is also the one to read. All files contain the answers.
"""
from pathlib import Path

from course.grading.release import ROOT, write
from course.quizzes.bank import PUBLIC, QUIZZES, read_quiz
from course.quizzes.formats import gift, notebook, text2qti
from mpi_impl.launch.entry import ArgumentParser, run_alone
from reference.errors import UserError

WRITERS = {"gift": (".gift", gift), "qti": (".txt", text2qti), "notebook": (".ipynb", notebook)}


def main() -> None:
    parser = ArgumentParser(prog="course.quizzes", description="Write the quizzes of the course.")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", type=Path, default=ROOT / "runs" / "quizzes",
                        help="where to write them (default: runs/quizzes)")
    parser.add_argument("--format", choices=WRITERS, default="gift", help="for Moodle, for Canvas, or for students "
                        "(default: %(default)s)")
    parser.add_argument("--variant", metavar="SEED", default=PUBLIC, help="any text, from which the exam's numbers are "
                        "drawn (default: %(default)s); if it is secret, nobody can look up the answers")
    options = parser.parse_args()
    if not options.variant.strip():
        raise UserError("The seed of --variant is empty. Give a text that nobody can guess, or leave --variant out.")
    suffix, text_of = WRITERS[options.format]
    zipped = qti_writer() if options.format == "qti" else None
    for quiz, title in QUIZZES.items():
        text, path = text_of(title, read_quiz(quiz, options.variant)), options.folder / (quiz + suffix)
        write(path, text.encode())
        if zipped:
            zipped(text, path.with_suffix(".zip"))
    print(f"{', '.join(QUIZZES)} are in {options.folder}.")


def qti_writer():
    """Return a function that writes a quiz in text2qti's text as QTI. Raises UserError if text2qti is missing."""
    try:
        from text2qti.config import Config
        from text2qti.qti import QTI
        from text2qti.quiz import Quiz
    except ImportError:
        raise UserError("text2qti, which makes Canvas's format, is not installed: "
                        "pip install './course[quizzes]'.") from None
    return lambda text, path: QTI(Quiz(text, config=Config())).save(path)


if __name__ == "__main__":
    run_alone(main)
