"""Search submissions for answers that look around in their process.

    python -m course.grading.search FOLDER_OR_NOTEBOOK ...

It lists words in answer cells. A word is no proof, and none is no proof of the contrary: a name can be put together at
run time.
"""
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from course.grading.answers import answers_of
from course.grading.submission import Unreadable, read
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.files import is_there
from reference.errors import UserError

WORDS = re.compile(
    r"\b(?:_getframe\w*|_current_frames|currentframe|f_back|f_locals|f_globals|tb_frame|tb_next|gi_frame|cr_frame"
    r"|ag_frame|__traceback__|__globals__|__closure__|__code__|__subclasses__|__builtins__|__loader__|__reduce\w*__"
    r"|__array_\w+__|gc|ctypes|mmap|_ask|_group|as_strided|sched_\w+|clock_get\w+|getp?pid|environ|_exit|__import__"
    r"|importlib|modules|builtins|exec|eval|compile|setattr|globals|socket|subprocess|threading|_thread|atexit"
    r"|signal)\b|/proc/|/dev/shm")


def main() -> None:
    parser = ArgumentParser(prog="course.grading.search",
                            description="List the words of answer cells that look around.")
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="a notebook, or a folder of notebooks")
    found = [line for path in parser.parse_args().paths for line in search(path)]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(found)} lines in answer cells.", file=sys.stderr)


def search(path: Path) -> Iterator[str]:
    """Yield a line for each suspicious line of each answer in a notebook, or in all notebooks below a folder.

    Raises UserError if the path is not there.
    """
    if not is_there(str(path)):
        raise UserError(f"{path} is not there. Name a notebook, or a folder of notebooks, as in "
                        "python -m course.grading.search submitted.")
    for notebook in sorted(path.rglob("*.ipynb")) if path.is_dir() else [path]:
        try:
            answers = answers_of(read(notebook))
        except Unreadable as problem:
            yield f"{notebook}: {problem}"
            continue
        for name, source in answers.items():
            for number, line in enumerate(source.splitlines(), 1):
                if words := sorted(set(WORDS.findall(line))):
                    yield f"{notebook}: {name}, line {number}: {', '.join(words)}"


if __name__ == "__main__":
    run_alone(main)
