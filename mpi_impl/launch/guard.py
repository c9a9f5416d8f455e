"""The guard of a job: a process that leaves nothing of the job behind, however `launch` ends.

    launch -> guard -> mpiexec -> its proxy on each host -> ranks -> their children

Each of these can be killed, and the others would run on. So `launch` only waits for its guard, which does the work and
learns of launch's death, SIGKILL included. Both are Linux subreapers: a process below them whose parent dies becomes
their own child. So they find every process of the job on this machine, and kill those that are left at the end.
"""
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import psutil

from mpi_impl.launch.entry import say
from mpi_impl.runtime import interrupt
from mpi_impl.runtime.rank_environment import forget_abandoned_memory, shared_memory

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36    # as <linux/prctl.h> has them
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
JOB_FOLDER = "SHARDLAB_JOB_FOLDER"  # a variable of the guard: the path of a folder that it may make
MPS = b"nvidia-cuda-mps\n"      # MPS's daemon and servers by name, of which Linux keeps 15 characters
MOST_FILES = 1 << 16        # that a process of the job may have open: mpiexec may need 4 for each host


def run_guarded(work: Callable[[], object]) -> int:
    """Do the work in a guard, and return its exit status. The guard gets the signals that this process is sent.

    The guard may make a folder, at the path in JOB_FOLDER; this process removes it, even if the guard is killed. The
    folder is in /tmp, since a socket's path has at most 108 bytes, and TMPDIR may be long.

    A signal that this process ignores from its start stays ignored: shells have their background jobs ignore SIGINT,
    and nohup SIGHUP. SIGTERM ends such a job.
    """
    parent, folder = os.getpid(), f"/tmp/shardlab-{os.urandom(8).hex()}"
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)       # whoever has started this may ignore it, and no child's status
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)      # is kept then; until the handlers of these are set
    guard = os.fork()
    if guard == 0:
        os.environ[JOB_FOLDER] = folder
        be_guard(work, parent)
    with leaving_nothing():
        for number in ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: os.kill(guard, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
        status = os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    shutil.rmtree(folder, ignore_errors=True)
    if status < 0:
        say(f"error: the process that guards the job died by signal {-status}, and the job ended with it.")
    return status if status >= 0 else 128 - status


def be_guard(work: Callable[[], object], parent: int) -> NoReturn:
    """Do the work, in a session of its own: a Ctrl-C in the terminal is for the parent alone."""
    os.setsid()
    end_with_parent()
    allow_files()
    interrupt.replace(signal.default_int_handler, interrupt.end)    # until `work` handles it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    if os.getppid() == parent:
        with leaving_nothing():
            work()
    sys.exit()


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """Kill every process that was started inside and is left at the end, and remove the memory that they shared."""
    before = shared_memory()
    set_process(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        end_descendants()
        forget_abandoned_memory(before)


def end_descendants() -> None:
    """Kill the children of this process until there are none: those of a child that is dead have become its own.

    Zombies count, too: the main thread of one is dead, but while others run, its children are still its own.
    """
    while children := psutil.Process().children():
        for process in children:
            process.kill()      # as a zombie, it has its number until it is waited for
            os.waitpid(process.pid, 0)


def states(ancestor: int, recursive: bool = False) -> dict[int, str]:
    """Map the children of a process, or all its descendants, to their states."""
    by_pid, gone = {}, contextlib.suppress(psutil.NoSuchProcess)
    with gone:
        for process in psutil.Process(ancestor).children(recursive):
            with gone:
                by_pid[process.pid] = process.status()
    return by_pid


def children(parent: int) -> set[int]:
    """Return the living children of a process."""
    return {pid for pid, state in states(parent).items() if state not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)}


def is_mps(pid: int) -> bool:
    """Report whether a process is MPS's daemon (mps.py), or a server of it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", "rb") as file:
        return file.read() == MPS
    return False


def wait(process: subprocess.Popen, seconds: float) -> int:
    """Wait for a process as `Popen.wait` does, but let signals interrupt the sleep alone.

    Where `Popen` holds its lock, a handler's exception would leave it locked, and every later wait forever.
    """
    deadline, nap = time.monotonic() + seconds, 5e-4
    while True:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        try:
            status = process.poll()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        left = deadline - time.monotonic()
        if status is not None:
            return status
        if left <= 0:
            raise subprocess.TimeoutExpired(process.args, seconds)
        nap = min(2 * nap, 0.05)
        time.sleep(min(nap, left))


class Losses:
    """A watch for the loss of a launcher's own processes, by which it starts ranks and watches over them.

    The launcher may not notice such a loss, since the ranks still hold the lost process's connection. But then they are
    this process's children.
    """

    def __init__(self, launcher: int):
        self.launcher, self.seen, self.suspected = launcher, set[int](), False

    def found(self) -> bool:
        """Report whether there is one, and was at the last look, too: a job that ends looks like this for a moment."""
        present = children(self.launcher)
        orphans = {pid for pid in children(os.getpid()) - {self.launcher} if not is_mps(pid)}
        self.seen |= present
        before, self.suspected = self.suspected, bool(orphans) and (not present or present < self.seen)
        return before and self.suspected


class Stops:
    """A watch for processes of a job that a signal, such as SIGSTOP, has stopped. A single rank, or a process of the
    launcher, is not waited for with a time limit by any other rank.
    """

    def __init__(self) -> None:
        self.told, self.since = set[int](), dict[int, float]()

    def found(self) -> list[int]:
        """Return those that were stopped at the last look, too, and have not been returned since they were."""
        now, before = time.monotonic(), self.since
        stopped = [pid for pid, state in states(os.getpid(), True).items() if state == psutil.STATUS_STOPPED]
        self.since = {pid: before.get(pid, now) for pid in stopped}
        fresh = self.since.keys() & before.keys() - self.told
        self.told = self.since.keys() & (self.told | fresh)
        return sorted(fresh)

    def longer_than(self, seconds: float) -> list[int]:
        """Return those that had been stopped for longer at the last look."""
        return [pid for pid, since in self.since.items() if time.monotonic() - since > seconds]


def allow_files() -> None:
    """Raise the limit of open files, often 1,024, as far as the system lets this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < (more := min(hard, MOST_FILES)):
        with contextlib.suppress(OSError, ValueError):      # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def exit_on_signals() -> None:
    """Have SIGTERM and SIGHUP raise SystemExit, so that this process cleans up before it ends."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def end_with_parent() -> None:
    """Have this process get a SIGTERM when its parent is gone, even by SIGKILL."""
    set_process(PR_SET_PDEATHSIG, signal.SIGTERM)


def set_process(what: int, value: int) -> None:
    """Tell Linux about this process; no other system knows such settings."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(what, value)
