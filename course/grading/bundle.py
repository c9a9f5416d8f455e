"""The students' bundle: one archive with all that a student needs, and without solutions, hidden tests and mistakes.

    shardlab/README.md, AGENTS.md           what to do, and what AI tutors may do
    shardlab/run.sh                         with the commands setup, demo and notebook
    shardlab/notebooks/                     the walkthroughs, and in labs/ the released labs
    shardlab/docs/                          the pages to which these link, and those that labs name
    shardlab/reference/, mpi_impl/          the packages
    shardlab/course/grading/                only what the labs and their checks need
    shardlab/course/labs/expected/          results that the checks compare with

A link to a file that students do not get becomes plain text.
"""
import posixpath
import re
import zipfile
from collections.abc import Callable, Collection, Mapping
from io import BytesIO
from pathlib import Path

import nbformat

from course.grading.stored import FOLDER

ROOT = Path(__file__).parents[2]
TEXTS = ROOT / "course" / "labs" / "bundle"      # the bundle's own pages
CHECKS = """__init__ answers broker checks conversation draws fork_server hunts kernel_limits lab_group limited_rank
    limits sandbox stored values""".split()     # of course/grading: what labs and their ranks import
FILES = ("LICENSE", "requirements/run.lock", "requirements/notebook.lock", "requirements/mpi/openmpi.lock",
         "requirements/mpi/intel.lock", "course/cheat_sheet.html", "course/__init__.py",
         *(f"course/grading/{name}.py" for name in CHECKS))
WITHHELD = "docs/bug_zoo.md"                     # lab 7 asks students to find such bugs
LINK = re.compile(r"!?\[([^]]*)\]\(([^)#\s]+)[^)]*\)")
SETTINGS = "notebooks/.jupyter"
SOURCES = {".py", ".cpp", ".cu", ".cuh", ".h", ".toml", ".html", ".css", ".js", ".typed"}     # of the packages
COMMANDS = {"demo", "notebook", "setup", "help"}    # of run.sh
FUNCTIONS = {"check", "check_cuda", "lock", "added", "pin"}   # of run.sh, which other commands need


def make_bundle(labs: Mapping[str, str], results: Mapping[str, bytes]) -> bytes:
    """Return the archive, with the text of each released lab's notebook, by name, and a variant's stored results."""
    files: dict[str, str | bytes] = {f"notebooks/labs/{lab}.ipynb": text for lab, text in labs.items()}
    files |= {path.name: path.read_text() for path in TEXTS.glob("*.md")}
    files |= {name: (ROOT / name).read_text() for name in FILES}
    files["run.sh"] = students_commands((ROOT / "run.sh").read_text())
    for path in [*(ROOT / "notebooks").glob("[0-9]*.ipynb"), *(ROOT / SETTINGS).rglob("*.json")]:
        files[name_of(path)] = path.read_text()
    add_linked(files)
    for package in "reference", "mpi_impl", "shardlab":
        files |= {name_of(path): path.read_text() for path in (ROOT / package).rglob("*") if path.suffix in SOURCES}
    files |= stored_results(results)
    return pack({f"shardlab/{name}": without_dead_links(name, data, files) for name, data in files.items()},
                {"shardlab/run.sh"})


def stored_results(results: Mapping[str, bytes], pattern: str = "*.bin") -> dict[str, bytes]:
    """Return the stored results of labs, by path: a variant's where it has them, else those of the public labs."""
    return {name_of(path): results.get(path.name, path.read_bytes()) for path in FOLDER.glob(pattern)}


def pack(files: Mapping[str, str | bytes], programs: Collection[str]) -> bytes:
    """Return a zip of files, by name, always the same; `programs` names those that can be executed."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name)     # whose time is that of 1980
            entry.external_attr = (0o755 if name in programs else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])
    return data.getvalue()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def add_linked(files: dict[str, str | bytes]) -> None:
    """Add the pages of docs/ and the pictures to which these files link, and those to which the pages link."""
    waiting = list(files)
    while waiting:
        name = waiting.pop()
        data = files[name]
        targets = LINK.findall(data) if isinstance(data, str) and name.endswith((".md", ".ipynb")) else []
        for page in {target_of(name, link) for _, link in targets} - files.keys() - {WITHHELD}:
            if re.fullmatch(r"docs/[^/]*|.*\.(svg|png)", page) and (ROOT / page).is_file():
                files[page] = (ROOT / page).read_bytes() if page.endswith(".png") else (ROOT / page).read_text()
                waiting.append(page)


def target_of(name: str, link: str) -> str:
    """Return the path in the bundle to which a relative link of a file leads."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))


def without_dead_links(name: str, data: str | bytes, files: Collection[str]) -> str | bytes:
    """Return a page or notebook whose links to files and folders that are not there are plain text."""
    def keep(found: re.Match) -> str:
        target = target_of(name, found[2])
        there = "://" in found[2] or any(file == target or file.startswith(f"{target}/") for file in files)
        return found[0] if there else found[1]

    return edit_text(name, data, lambda text: LINK.sub(keep, text)) if isinstance(data, str) else data


def edit_text(name: str, data: str, edit: Callable[[str], str]) -> str:
    """Edit a page, or the texts of a notebook, which jupytext then pairs with no script: students edit one file."""
    if name.endswith(".md"):
        return edit(data)
    if not name.endswith(".ipynb"):
        return data
    notebook = nbformat.reads(data, as_version=4)
    notebook.metadata.pop("jupytext", None)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = edit(cell.source)
    return nbformat.writes(notebook) + "\n"


def students_commands(run_sh: str) -> str:
    """Return run.sh with only those commands that work in the bundle."""
    usage = r"^  ([a-z][\w-]*) .*\n(?:   .*\n)*"                         # a command, and the lines indented below it
    case = r"^    ([a-z][\w-]*)\)  .*;;\n"
    function = r"(?:^#.*\n)*^(\w+)\(\) \{\n(?:.*\n)*?^\}\n\n"             # with the comment above it
    for pattern in usage, case:
        run_sh = re.sub(pattern, lambda found: found[0] if found[1] in COMMANDS else "", run_sh, flags=re.MULTILINE)
    return re.sub(function, lambda found: "" if found[1] in FUNCTIONS else found[0], run_sh, flags=re.MULTILINE)
