"""Make a course of the labs: `python -m course.grading.release [FOLDER]`, which is `./run.sh labs`.

    nbgrader_config.py              nbgrader's configuration; made once, and then yours to change
    check_seed.txt                  the secret seed of the checks' random numbers; made once
    variant.txt                     with --variant: the seed of the labs' variant; kept for later runs
    expected/LAB.bin                with --variant: the right results of whole layers that students get
    source/LAB/LAB.ipynb            the instructor's notebook, made from course/labs/LAB.py
    release/LAB/LAB.ipynb           the student's notebook, which nbgrader makes from it
    gradescope/LAB.zip              an autograder for Gradescope
    classroom50/LAB/                an autograder for Classroom 50
    students/shardlab.zip           the students' bundle: the released labs, and all that they need
    answers/                        with --answers: those to all open questions of walkthroughs and labs
    gradebook.db                    nbgrader's gradebook; it is kept, as are submissions and grades

A second run makes the same files. A run that could damage submissions, or lose changes made by hand, is refused before
it writes anything.
"""
import copy
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbgrader.api import Gradebook
from nbgrader.converters import GenerateAssignment
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import ClearHiddenTests, ClearSolutions
from nbgrader.utils import capture_log
from traitlets.config import PyFileConfigLoader

from course.grading.answers import about
from course.grading.bundle import make_bundle, name_of, pack, stored_results
from course.grading.draws import SEED_FILE, new_seed, read_seed
from course.grading.expected import expected, has_results
from course.grading.hunts import FILE
from course.grading.lab_source import labs, notebook_of
from course.grading.model_answers import open_answers, write_pages
from course.grading.variants import FILE as VARIANT_FILE, PUBLIC
from course.grading.writing import is_writing
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.files import check_folder, is_there, read_text, reading, replacing, writing
from reference.errors import UserError

ROOT = Path(__file__).parents[2]
MODULES = ("reference/**/*.py", "mpi_impl/**/*.py", "shardlab/**/*.py",
           "course/__init__.py", "course/grading/**/*.py")      # of a grader
NEEDED = ("numpy", "nbformat")      # of LOCKS, for grading, which needs no MPI
LOCKS = ("run.lock", "notebook.lock")

CONFIG = '''"""nbgrader's configuration of this course. ./run.sh labs never overwrites it: add what you need."""
from course.grading.nbgrader_checks import configure

c = get_config()
configure(c)
'''

SETUP = '''#!/usr/bin/env bash
# Gradescope runs this once, as root, to make the image in which submissions are graded.
set -euo pipefail
cd "${AUTOGRADER:-/autograder}/source"

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            return 0
        fi
    done
    return 1
}

if ! find_python; then
    apt-get update
    apt-get install -y python3.11 python3.11-venv || apt-get install -y python3 python3-venv
    find_python || { echo "error: labs are graded with Python 3.11 or newer: choose a newer base image." >&2; exit 1; }
fi
"$python" -m venv .venv
.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt -c constraints.txt
'''

RUN = '''#!/usr/bin/env bash
# Gradescope runs this for every submission.
cd "${{AUTOGRADER:-/autograder}}/source" || exit 1
exec .venv/bin/python -m course.grading.gradescope --seed-file {seed_file} \\
    {lab}.ipynb ../submission ../results/results.json
'''

AUTOGRADER = '''"""Grade {lab}. Classroom 50 runs this in the student's checkout, and reads result.json there."""
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

with TemporaryDirectory() as folder:        # Python imports from where it runs: never from a student's files
    shutil.unpack_archive(Path(__file__).with_name("grader.zip"), folder)
    for command in (["pip", "install", "--quiet", "-r", "requirements.txt", "-c", "constraints.txt"],
                    ["course.grading.classroom50", "{lab}.ipynb", Path.cwd()]):
        subprocess.run([sys.executable, "-m", *command], cwd=folder, check=True)
'''


def main() -> None:
    parser = ArgumentParser(prog="./run.sh labs", description="Make a course of the labs, for nbgrader and Gradescope.")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", type=Path, default=ROOT / "runs" / "course",
                        help="the course's folder (default: runs/course)")
    parser.add_argument("--variant", metavar="SEED", help="draw the variant of this seed of the labs: other tasks of "
                        "the same kind, with other solutions. The folder keeps the seed (default: the public labs)")
    parser.add_argument("--answers", action="store_true", help="also write the answers to all open questions, for "
                        "instructors, into the course's folder; this asks for the instructors' passphrase")
    options = parser.parse_args()
    os.umask(0o077)     # a course has seeds, solutions and grades: nobody else may read what is made from here on
    folder, answers = options.folder.absolute(), open_answers() if options.answers else {}
    make_course(folder, variant=options.variant)
    if options.answers:
        write_pages(folder / "answers", answers)
        print(f"The answers to the open questions are in {folder / 'answers'}. Keep them from students.")


def make_course(folder: Path, sources: list[Path] | None = None, variant: str | None = None) -> None:
    """Make or renew the course in this folder, of these labs or of all. Raises UserError.

    Without a seed of a `variant`, the course keeps its own.
    """
    sources = sources or labs()
    check_course(folder)
    submitted = read_submitted(folder)
    variant = check_variant(folder, variant, sum(count for count, _ in submitted.values()))
    made = {source.stem: sign(notebook_of(source, variant)) for source in sources}
    for lab, notebook in made.items():
        check_unchanged(folder / "source" / lab / f"{lab}.ipynb")
        check_cells(folder, lab, notebook, *submitted.get(lab, (0, set())))
    if not (folder / "nbgrader_config.py").exists():
        write(folder / "nbgrader_config.py", CONFIG.encode())
    if variant != PUBLIC:
        write(folder / VARIANT_FILE, f"{variant}\n".encode())
        for source in filter(has_results, sources):
            write(folder / "expected" / f"{source.stem}.bin", expected(source, variant))
    secrets = {SEED_FILE: f"{course_seed(folder / SEED_FILE)}\n"} | hunts(folder)
    for lab, notebook in made.items():
        write(folder / "source" / lab / f"{lab}.ipynb", nbformat.writes(notebook).encode() + b"\n")
        release(folder, lab)
        write(folder / "gradescope" / f"{lab}.zip", autograder(lab, notebook, secrets))
        for name, data in public_autograder(lab, read_releases(folder)[lab], read_results(folder)).items():
            write(folder / "classroom50" / lab / name, data)
        print(f"{lab}: source, release and autograders; {describe_points(notebook)}", flush=True)
    write(folder / "students" / "shardlab.zip", make_bundle(read_releases(folder), read_results(folder)))
    print(f"The course is in {folder}. course/README.md explains the next steps.")


def course_seed(path: Path) -> str:
    """Return the secret seed of the course, which is made if it is missing. nbgrader does not copy its file."""
    if not path.exists():
        write(path, f"{new_seed()}\n".encode())
    return read_seed(path)


# ---- checks that nothing is lost ----

def read_submitted(folder: Path) -> dict[str, tuple[int, set[str]]]:
    """Return for each lab in a course's gradebook how many submissions it has, and the names of its cells."""
    if not (folder / "gradebook.db").exists():
        return {}
    with open_gradebook(folder / "gradebook.db") as gradebook:
        return {lab.name: (len(lab.submissions), {cell.name for notebook in lab.notebooks
                                                  for cell in notebook.source_cells}) for lab in gradebook.assignments}


def check_variant(folder: Path, asked: str | None, submissions: int) -> str:
    """Return the seed of the course's variant: what was asked for, or its own. Raises UserError."""
    path = folder / VARIANT_FILE
    own = read_text(str(path)).strip() if path.exists() else PUBLIC
    if asked is not None and not asked.strip():
        raise UserError("The seed of --variant is empty, which stands for the public variant. Give a text that nobody "
                        "can guess, or leave --variant out.")
    asked = own if asked is None else asked.strip()
    if asked != own and submissions:
        raise UserError(f"{folder} has {submissions} submissions to labs of {describe_variant(own)}, which do not fit "
                        f"those of {describe_variant(asked)}. Leave --variant out, or make a new course in another "
                        "folder.")
    return asked


def describe_variant(seed: str) -> str:
    return f"the variant {seed!r}" if seed != PUBLIC else "the public variant"


def check_course(folder: Path) -> None:
    """Check that the folder is a course, or empty. Raises UserError."""
    check_folder(str(folder))
    with reading(str(folder)):
        strange = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if strange and not (folder / "nbgrader_config.py").is_file():
        raise UserError(f"{folder} is not a course: it holds {strange[0]}, but no nbgrader_config.py. Name a new "
                        "folder, as in ./run.sh labs ~/course.")


def check_unchanged(path: Path) -> None:
    """Check that the instructor's notebook was not changed by hand. Raises UserError."""
    if not path.exists():
        return
    try:
        notebook = nbformat.read(path, as_version=4)
        changed = notebook.metadata.get("shardlab", {}).get("made") != digest(notebook)
    except Exception:       # nbformat raises many kinds
        changed = True
    if changed:
        raise UserError(f"{path} has been changed by hand, and this would be lost. Make the change in course/labs/"
                        f"{path.stem}.py, from which it is made, and move the notebook away.")


def check_cells(folder: Path, lab: str, notebook, submissions: int, before: set[str]) -> None:
    """Check that graded submissions can be graded again, since the lab still has the same cells. Raises UserError."""
    now = {about(cell)["grade_id"] for cell in notebook.cells if about(cell)}
    if submissions and before != now:
        other = ", ".join(sorted(before ^ now))
        raise UserError(f"{lab} has {submissions} submissions in {folder / 'gradebook.db'}, but its cells have changed "
                        f"since then ({other}). In a running course change the contents of cells, but neither their "
                        "number nor their names; or make a new course in another folder.")


def open_gradebook(database: Path) -> Gradebook:
    """Open nbgrader's gradebook, which is there. Raises UserError."""
    if not is_there(str(database)):
        raise UserError(f"There is no {database}: --course names the folder that ./run.sh labs has made.")
    find_programs()
    try:
        return Gradebook(f"sqlite:///{database}", "shardlab")
    except Exception as error:      # of the database
        raise UserError(f"{database} is not a gradebook of nbgrader's ({type(error).__name__}). Move it away, or put a "
                        "copy of the right one there.") from error


def find_programs() -> None:
    """Put this Python's folder on PATH, where nbgrader finds alembic. An activated .venv has done so already."""
    beside = str(Path(sys.executable).parent)
    if beside not in os.get_exec_path():
        os.environ["PATH"] = os.pathsep.join([beside, *os.get_exec_path()])


# ---- the notebooks ----

def sign(notebook):
    """Add a digest that reveals changes made by hand."""
    notebook.metadata["shardlab"] = {"made": digest(notebook)}
    return notebook


def digest(notebook) -> str:
    """Return the digest of a notebook's cells; Jupyter changes the rest when it saves."""
    cells = [[cell.cell_type, cell.source, about(cell)] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()


def release(folder: Path, lab: str) -> None:
    """Let nbgrader make the student's notebook, and add the lab to the gradebook."""
    find_programs()
    config = PyFileConfigLoader("nbgrader_config.py", path=str(folder)).load_config()
    config.CourseDirectory.root = str(folder)
    config.CourseDirectory.assignment_id = lab
    converter = GenerateAssignment(coursedir=CourseDirectory(config=config), config=config, force=True)
    converter.log.propagate = False
    outcome = capture_log(converter)
    if not outcome["success"]:
        raise UserError(f"nbgrader could not release {lab}. It said: {outcome.get('log') or outcome['error']}")


def read_releases(folder: Path) -> dict[str, str]:
    """Return the text of each released notebook, by the lab's name."""
    return {path.stem: path.read_text() for path in sorted((folder / "release").glob("*/*.ipynb"))}


def read_results(folder: Path) -> dict[str, bytes]:
    """Return the stored results of a course's variant, by the name of the file."""
    return {path.name: path.read_bytes() for path in (folder / "expected").glob("*.bin")}


def without_secrets(notebook):
    """Return an instructor's notebook as students get it: without solutions and hidden tests."""
    for clear in ClearSolutions(), ClearHiddenTests():
        notebook, _ = clear.preprocess(copy.deepcopy(notebook), {})
    return notebook


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, and make its folder. Raises UserError."""
    with writing(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(str(path)) as aside:
        Path(aside).write_bytes(data)


def describe_points(notebook) -> str:
    """Return '9 checks with 60 points, 2 texts with 10'."""
    checks = [about(cell)["points"] for cell in notebook.cells if "points" in about(cell) and not is_writing(cell)]
    texts = [about(cell)["points"] for cell in notebook.cells if is_writing(cell)]
    return f"{len(checks)} checks with {sum(checks):g} points, {len(texts)} texts with {sum(texts):g}"


# ---- Gradescope, and Classroom 50 ----

def hunts(folder: Path) -> dict[str, str]:
    """Return the course's file of bugs to hunt, if it has one."""
    return {FILE: (folder / FILE).read_text()} if (folder / FILE).exists() else {}


def autograder(lab: str, notebook, secrets: dict[str, str]) -> bytes:
    """Make Gradescope's zip: its two scripts, and all files that they need."""
    files = {"setup.sh": SETUP, "run_autograder": RUN.format(lab=lab, seed_file=SEED_FILE), **secrets}
    return pack(files | grader(lab, nbformat.writes(notebook)), {"setup.sh", "run_autograder"})


def public_autograder(lab: str, released: str, results: Mapping[str, bytes]) -> dict[str, bytes]:
    """Make Classroom 50's autograder, of what students have, with a variant's stored results: students can read it."""
    files = grader(lab, released) | stored_results(results, f"{lab}.bin")
    return {"autograder.py": AUTOGRADER.format(lab=lab).encode(), "grader.zip": pack(files, ())}


def grader(lab: str, text: str) -> dict[str, str | bytes]:
    """Return the files that grade a lab by the checks in this text of a notebook."""
    lock = "".join((ROOT / "requirements" / name).read_text() for name in LOCKS)
    pins = re.findall(r"^[\w.-]+==[^\s\\]+(?: ; [^\\\n]+)?(?= \\$)", lock, re.MULTILINE)
    return {f"{lab}.ipynb": text,
            "requirements.txt": "\n".join(NEEDED) + "\n", "constraints.txt": "\n".join(pins) + "\n",
            **{name_of(path): path.read_text() for pattern in MODULES for path in ROOT.glob(pattern)}}


if __name__ == "__main__":
    run_alone(main)
