"""The commands that READMEs show, taken from their text, and a copy of the project as a clone has it."""
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from shardlab.command import Module, program_of
from tests.launching import ROOT

TEXTS = ("README.md", "notebooks/README.md",
         *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/*.md")) if path.stem != "developing"))


class Command(NamedTuple):
    """A line that starts a program of the project."""

    words: list[str]        # 'python' or 'mpiexec' first, wherever it stands
    program: str            # 'shardlab.plan', ...
    ranks: int
    options: list[str]      # of the program

    def __str__(self) -> str:
        return shlex.join(self.words)


# Of `shardlab`'s commands, these are whole without options; of the others a text may speak by their names.
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(\.venv/bin/)?((python|mpiexec|mpirun) .*-m |shardlab ([a-z_]+ |demo|doctor))")


def commands() -> list[Command]:
    """Return every command that stands in a block or between backticks, but for those that leave something out."""
    found = []
    for name in TEXTS:
        text = (ROOT / name).read_text()
        blocks = [block for language, block in FENCE.findall(text) if not language]
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        found += [line for line in (line.partition("  #")[0] for line in lines)
                  if COMMAND.match(line) and "..." not in line]
    return [parsed(line) for line in dict.fromkeys(found)]


def parsed(line: str) -> Command:
    words = [word.removeprefix(".venv/bin/").replace("mpirun", "mpiexec") for word in shlex.split(line)]
    if words[0] == "shardlab":
        return named_in_short(words[1:])
    last = max(i for i, word in enumerate(words) if word == "-m")
    if not words[last + 1].startswith(("mpi_impl.", "shardlab.", "reference.")):    # as -m is the program's option, too
        last = words.index("-m")
    ranks = re.search(r" -(?:n|np) (\d+) ", " ".join(words[:last + 1]))
    return Command(words, words[last + 1], int(ranks[1]) if ranks else 1, words[last + 2:])


def named_in_short(argv: list[str]) -> Command:
    """Return a command of `shardlab`, which says itself what it starts."""
    program, words = program_of(argv), ["python", "-m", "shardlab", *argv]
    if isinstance(program, Module):
        return Command(words, program.name, 1, program.argv)
    started, *options = program.module or program.script
    return Command(words, started, program.n, options)


def copy_as_cloned(folder: Path) -> Path:
    """Copy what git keeps, or would: nothing that earlier runs have left."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("This is not a clone, so that nobody knows which files are the project's.")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder
