"""Small programs that tests start on real ranks, through mpi_impl.launch, from a folder of their own."""
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mpi_impl.comm.mpi_library import start
from mpi_impl.launch.launcher import mpi_vendor
from mpi_impl.runtime.mpis import implementation

ROOT = Path(__file__).parents[1]
start()                                 # before its name is asked for, which only loads it
MPI = implementation(mpi_vendor())      # whose tests these are
# Open MPI's, on which rank ended a job, and how; or on a socket that is closed already.
LAUNCHERS_WORDS = re.compile(r"^-{74}\n.*?^-{74}\n|^\[\S+\] PMIX ERROR: PMIX_ERR_UNREACH [^\n]*\n", re.M | re.S)
SOON = 30  # seconds: far more than any of these jobs needs, far less than a job that hangs

PREAMBLE = """\
import os, signal, sys, time
from mpi_impl.comm.group import world
from mpi_impl.launch.entry import ArgumentParser, run
from reference.errors import UserError
"""


def write_program(folder: Path, main: str) -> Path:
    """Write a program whose `main()` has this body, in which `rank` is the rank and `wait()` waits for all others."""
    body = textwrap.indent(textwrap.dedent(main), "    ")
    head = "def main():\n    rank, wait = world().rank, world().comm.Barrier\n"
    program = folder / "program.py"
    program.write_text(f"{PREAMBLE}\n{head}{body}\nif __name__ == '__main__':\n    run(main)\n")
    return program


def write_script(path: Path, body: str) -> None:
    """Write a shell script that can be run, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment variables and these; Shardlab can be imported from any folder."""
    return os.environ | {"PYTHONPATH": str(ROOT)} | (more or {})


def command(*arguments, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run this Python with these arguments to its end; a job that hangs fails the test."""
    line = [sys.executable, *map(str, arguments)]
    done = subprocess.run(line, env=environment(env), capture_output=True, text=True, timeout=SOON)
    done.stderr = LAUNCHERS_WORDS.sub("", done.stderr)
    return done


def launch(ranks: int, *program, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run a program, or launch options and a program, on this many ranks."""
    return command("-m", "mpi_impl.launch", "-n", ranks, *program, env=env)


def in_foreground() -> None:
    """Undo, in a new child, what a shell does to its background jobs: they ignore SIGINT, and under nohup SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def in_background() -> None:
    """Ignore the signals, in a new child, that `nohup COMMAND &` ignores."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def launched(ranks: int, program: Path, place: Callable[[], None] = in_foreground,
             options: Sequence[str] = ()) -> Iterator[subprocess.Popen]:
    """Yield a running job, and end it with the `with` block."""
    line = [sys.executable, "-m", "mpi_impl.launch", "-n", str(ranks), str(program), *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, env=environment(), stdout=pipe, stderr=pipe, text=True, preexec_fn=place) as job:
        try:
            yield job
        finally:
            job.terminate()
