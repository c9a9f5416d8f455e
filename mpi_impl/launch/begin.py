"""The program that starts a rank: `python begin.py VARIABLES own|user PROGRAM ...`.

PROGRAM is `-m MODULE` or a script, followed by its options; one of VARIABLES holds the rank. Our own programs are
imported from the clone of this file, whatever the current folder holds. A user's program imports what Python would
import for it, and nothing of ours is imported before: a `random.py` or a `reference/` next to it is its own.

In MPI's shutdown a rank that fails waits for the others, and they wait for it. So a user's rank that raises, or that
leaves by sys.exit while others are at work, ends the job. Each rank reports to the launcher (reports.py) where it is,
and that it has ended.
"""
import os
import runpy
import sys
import threading
import time
import types
from contextlib import suppress
from glob import escape, glob

REPORTS = "SHARDLAB_REPORTS"    # where the launcher tells ranks the folder of their reports
FAILED, SAID = "failed", "said"     # files there: the first failed rank's status; a rank has printed why it failed
SECONDS_TO_REPORT = 2           # between two looks at where the rank is
PATIENCE = 1.0                  # seconds within which ranks that leave together have all ended
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main() -> None:
    variables, whose, *words = sys.argv[1:]
    rank = next((os.environ[name] for name in variables.split(",") if name in os.environ), "0")
    if whose == "own":
        if ROOT not in sys.path:
            sys.path.insert(0, ROOT)
        run(words)
    else:
        if not sys.flags.safe_path:
            del sys.path[0]     # the folder of this file
        claim(rank)
        threading.Thread(target=report_places, args=(rank, threading.get_ident()), daemon=True).start()
        run_watched(words, rank, os.environ["SHARDLAB_WORLD_SIZE"])


def run(words: list[str]) -> None:
    """Run `-m MODULE ...`, or a script, as Python does, in a `__main__` of its own."""
    script = words[0] != "-m"
    sys.argv[:] = words if script else words[1:]
    path = os.path.abspath(words[0])
    if not sys.flags.safe_path and not os.path.isdir(path):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)) if script else os.getcwd())
    if not script:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif not path.endswith(".py"):      # a folder or an archive, perhaps
        runpy.run_path(path, run_name="__main__")
    else:
        program = sys.modules["__main__"] = types.ModuleType("__main__")
        program.__file__ = path
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, program.__dict__)


def report_places(rank: str, thread: int) -> None:
    """Write every two seconds where a thread is, and for how many looks in a row it has been there.

    mpi4py releases the interpreter's lock while it waits. (faulthandler's own thread does not take that lock, and may
    crash on a stack that changes.)
    """
    before, looks = None, 0
    with suppress(KeyError, OSError):   # the rank is on another machine, or the job has ended
        path = os.path.join(os.environ[REPORTS], rank)
        while True:
            time.sleep(SECONDS_TO_REPORT)
            stack: list[tuple] = []
            frame: types.FrameType | None = sys._current_frames()[thread]
            while frame:
                stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
                frame = frame.f_back
            looks = looks + 1 if stack == before else 1
            before = stack
            with open(f"{path}.new", "w", encoding="utf-8", errors="replace") as file:
                file.write("\n".join(map(str, (looks, *stack[0]))))
            os.replace(f"{path}.new", path)


def run_watched(words: list[str], rank: str, size: str) -> None:
    """Run a user's program. If it fails, end all ranks, with one message."""
    process = os.getpid()
    try:
        run(words)
        claim(f"{rank}.end")
    except BaseException as error:
        if os.getpid() != process:      # a child of the rank
            raise
        claim(f"{rank}.end")
        left, status = isinstance(error, SystemExit), status_of(error)
        if status == 0:
            raise
        claim(FAILED, str(status))
        if left and all_left(int(size)):
            raise
        if claim(SAID):
            explain(error, f"error: rank {rank} of {size}", left)
            end_others(status)
        sys.exit(status)


def explain(error: BaseException, who: str, left: bool) -> None:
    """Print how a rank has failed: a sentence, after the traceback from the program on if the rank has raised."""
    code, trace = getattr(error, "code", None), error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    if not left:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        print(f"{who} failed with the traceback above; the job has been ended.", file=sys.stderr)
    else:
        print(f"{who} left the program by sys.exit({code!r}), and the job has been ended.", file=sys.stderr)


def status_of(error: BaseException) -> int:
    """Return the exit status that Python gives to an uncaught error."""
    code = error.code if isinstance(error, SystemExit) else 1
    return status_byte(code) if isinstance(code, int) else int(code is not None)


def status_byte(status: int) -> int:
    """Return a status as the system keeps it, in a byte; but a failure such as 256 stays a failure."""
    return status % 256 or int(status != 0)


def end_others(status: int) -> None:
    """End all ranks by MPI if it has started; else the launcher does."""
    mpi = sys.modules.get("mpi4py.MPI")
    sys.stdout.flush()
    time.sleep(0.2)     # a launcher may lose what was written just before
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(status)


def all_left(size: int) -> bool:
    """Report whether every rank of this machine has ended, or ends within PATIENCE."""
    ends, deadline = os.path.join(escape(os.environ.get(REPORTS, "")), "*.end"), time.monotonic() + PATIENCE
    while len(glob(ends)) < size and time.monotonic() < deadline:
        time.sleep(0.02)
    return len(glob(ends)) >= size or size == 1


def claim(name: str, text: str = "") -> bool:
    """Write a file for the launcher, and report whether this rank is the first of this machine to write it."""
    with suppress(KeyError, OSError):
        try:
            with open(os.path.join(os.environ[REPORTS], name), "x") as file:
                file.write(text)
        except FileExistsError:
            return False
    return True


if __name__ == "__main__":
    main()
