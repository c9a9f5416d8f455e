"""Answers to every question that the walkthroughs and labs leave open, for instructors only.

    ./run.sh labs --answers                         write them, in FOLDER/answers, a page for each walkthrough and lab
    python -m course.grading.model_answers FOLDER          seal the changed pages of this folder again

The public tree has them encrypted, in course/labs/answers.sealed: a line with the digest of each question that is
answered, an empty line, and what `openssl enc` makes of the answers and a passphrase. Only the passphrase is secret.
A question whose wording changes has another digest: its answer has to be looked at, and sealed again.
"""
import hashlib
import json
import os
import re
import shutil
import subprocess
from getpass import getpass
from pathlib import Path
from typing import NamedTuple

from course.grading.lab_source import LABS, labs
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.files import read_text, reading, write_whole
from reference.errors import UserError

WALKTHROUGHS = LABS.parents[1] / "notebooks" / "sources"
SEALED = LABS / "answers.sealed"
VARIABLE = "SHARDLAB_ANSWERS_PASSPHRASE"
CIPHER = ["openssl", "enc", "-aes-256-cbc", "-pbkdf2", "-iter", "600000", "-md", "sha256", "-a",
          "-pass", f"env:{VARIABLE}"]
LISTED = 10     # questions without an answer that a message names
OPEN = re.compile(r"^## (Try it|Exercises|To think about)$", re.MULTILINE)
ITEM = re.compile(r"^(?:(\d+)\.|-) (.*(?:\n .*)*)(\n\n<details><summary>Answer</summary>)?", re.MULTILINE)
NAMED = re.compile(r"<summary>Answer to (\d+)</summary>")      # below the whole list
WRITING = re.compile(r"^\*\*(?:First|Second)\*\* \(\d+ points\)\. (.*(?:\n.+)*)", re.MULTILINE)


class OpenQuestion(NamedTuple):
    """A question that a walkthrough or a lab leaves open."""

    page: str       # the stem of its source
    text: str       # on one line

    @property
    def digest(self) -> str:
        """Return a digest of the wording, which does not change when walkthroughs get other names or numbers, or a file
        moves from `mpi_impl/` to `shardlab/`.
        """
        wording = re.sub(r"\b([Ww]alkthroughs?|[Ll]abs?) (?:\d+|\*[^*]+\*)|\b\d\d_", r"\1", self.text)
        return hashlib.sha256(wording.replace("shardlab/", "mpi_impl/").encode()).hexdigest()[:20]


def main() -> None:
    parser = ArgumentParser(prog="course.grading.model_answers", description="Seal the instructors' answers again.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the pages of ./run.sh labs --answers")
    folder = parser.parse_args().folder
    answers = read_pages(folder)
    write_whole(str(SEALED), seal(answers, read_passphrase()))
    print(f"{SEALED} has {len(answers)} answers. Commit it; keep {folder} out of every repository.")


# ---- questions ----

def questions() -> list[OpenQuestion]:
    """Return all open questions, page by page. One with a public answer below it is not open."""
    return [question for source in [*sorted(WALKTHROUGHS.glob("[0-9]*.py")), *labs()]
            for question in questions_of(source.stem, source.read_text())]


def questions_of(page: str, source: str) -> list[OpenQuestion]:
    """Return the open questions in the texts of one source."""
    found = []
    for cell in re.split(r"^# %% ?", source, flags=re.MULTILINE):
        if cell.startswith("[markdown]"):
            text = re.sub(r"^# ?", "", cell, flags=re.MULTILINE)
            if heading := OPEN.search(text):
                rest = text[heading.end():]
                public = NAMED.findall(rest)
                found += [item for n, item, answer in ITEM.findall(rest) if not answer and n not in public]
            found += WRITING.findall(text)
    return [OpenQuestion(page, " ".join(text.split())) for text in found]


# ---- the sealed file ----

def seal(answers: dict[str, str], passphrase: str) -> str:
    """Return the text of the sealed file, with the digests of the questions in the open."""
    digests = "".join(f"{digest}\n" for digest in sorted(answers))
    return f"{digests}\n{run_cipher([], json.dumps(answers, sort_keys=True), passphrase)}"


def unseal(text: str, passphrase: str) -> dict[str, str]:
    """Return the answers, by the digest of their question. Raises UserError."""
    plain = run_cipher(["-d"], text.partition("\n\n")[2], passphrase)
    answers = json.loads(plain)
    if sorted(answers) != answered_digests(text):
        raise UserError("The sealed answers do not belong to the list of questions above them: take the file from a "
                        "clone of the project again.")
    return answers


def answered_digests(text: str) -> list[str]:
    """Return the digests of the questions that a sealed file answers. No passphrase is needed."""
    return text.partition("\n\n")[0].split()


def run_cipher(options: list[str], text: str, passphrase: str) -> str:
    """Encrypt a text, or decrypt it with the option -d. Raises UserError."""
    if shutil.which(CIPHER[0]) is None:
        raise UserError("The answers are encrypted with openssl, which is not on PATH: install it.")
    done = subprocess.run([*CIPHER, *options], input=text.encode(), capture_output=True,
                          env={**os.environ, VARIABLE: passphrase})
    try:
        plain = done.stdout.decode()
    except UnicodeDecodeError:
        plain = ""
    if done.returncode or ("-d" in options and not plain.startswith("{")):     # padding fits one wrong key in 256
        raise UserError("The passphrase does not open the answers. course/README.md says how instructors get "
                        "the right one.")
    return plain


def read_passphrase() -> str:
    """Return the passphrase, from the environment or the keyboard."""
    try:
        return os.environ.get(VARIABLE) or getpass("Passphrase of the instructors' answers: ")
    except EOFError as error:
        raise UserError(f"The instructors' answers need their passphrase, but there is no keyboard to type it: set "
                        f"{VARIABLE}.") from error


# ---- pages that people read and change ----

def open_answers() -> dict[str, str]:
    """Ask for the passphrase, and return the answers, by the digest of their question. Raises UserError."""
    return unseal(read_text(str(SEALED)), read_passphrase())


def write_pages(folder: Path, answers: dict[str, str]) -> None:
    """Write a page for each walkthrough and lab: every question, and its answer below, if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    pages: dict[str, str] = {}
    for question in questions():
        page = pages.setdefault(question.page, f"# {question.page}\n\nFor instructors only.\n")
        pages[question.page] = f"{page}\n> {question.text}\n\n{answers.get(question.digest, '').strip()}\n"
    for name, text in pages.items():
        write_whole(str(folder / f"{name}.md"), text)


def read_pages(folder: Path) -> dict[str, str]:
    """Return the answers that pages give to today's questions. Raises UserError if a question has none."""
    given: dict[str, str] = {}
    with reading(str(folder)):
        pages = sorted(path for path in folder.iterdir() if path.suffix == ".md")
    for path in pages:
        for block in re.split(r"^> ", read_text(str(path)), flags=re.MULTILINE)[1:]:
            text, _, answer = block.partition("\n")
            given[OpenQuestion(path.stem, text.strip()).digest] = answer.strip()
    missing = [question for question in questions() if not given.get(question.digest)]
    if missing:
        listed = "\n".join(f"{question.page}: {question.text}" for question in missing[:LISTED])
        listed += f"\nand {len(missing) - LISTED} others" * (len(missing) > LISTED)
        raise UserError(f"{folder} has no answer to {len(missing)} questions. Put each of them, on one line behind "
                        f"'> ', and its answer below it, into a page there:\n{listed}")
    return {question.digest: given[question.digest] for question in questions()}


if __name__ == "__main__":
    run_alone(main)
