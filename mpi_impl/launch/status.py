"""The explanation of a launcher's exit status.

A rank that exits with status 9 and a rank that dies by signal 9 lead to the same status. Most launchers print a banner
after a signal (output.py), and ranks report when they end the job themselves (reports.py).
"""
import os
import re
import resource
import signal

from mpi_impl.runtime.mpis import SHARED_MEMORY
from mpi_impl.runtime.rank_environment import shared_memory_error
from mpi_impl.runtime.tables import bytes_of

# The signals that end a rank without a message. A launcher's status is then the signal's number, or 128 more.
DEATHS = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV, signal.SIGALRM,
          signal.SIGTERM, signal.SIGXFSZ)

LAUNCHER_FAILED = 255  # the status of a launcher that fails itself
ENOUGH_SHARED = 256 << 20   # bytes, for 8 ranks and more (ROOM in comm/transports/shared_memory.py)
LARGEST_FILE = 64 << 20     # bytes: enough for MPI's part of it
IN_BANNER = re.compile(rb"signal:? (\d+)", re.I)


def explain(status: int, launcher: str, banner: bytes, tells: bool = False) -> str:
    """Return a sentence on how the job has ended, or "" if the program asked for the status. `tells` says that this
    launcher prints a banner whenever a rank dies by a signal.
    """
    if status < 0:
        return f"error: the job ended with its launcher {launcher}, which died by {describe_signal(-status)}."
    if status == LAUNCHER_FAILED:
        return (f"error: the launcher {launcher} failed with status {status}, and the job ended with it; it may do so "
                "if a rank dies (out of memory is a common cause), if one of its own processes dies, or if the program "
                "asked for that status.")
    if os.path.basename(launcher) == "srun":
        return "" if status <= 128 else (
            f"error: srun ended with status {status}. Either a rank died by signal {status - 128}, or srun could not "
            "start one, or ended all because one failed: its own lines above say which.")
    if told := IN_BANNER.search(banner):
        return f"error: a rank died by {describe_signal(int(told[1]))}.{shared_memory_hint()}"
    number = status if status in DEATHS else status - 128
    if number not in DEATHS:
        return ""
    if tells:
        return (f"error: a rank, or MPI in it, ended the job with status {status}, and no signal did: lines above may "
                f"say why.{shared_memory_hint()}")
    return (f"error: the launcher's status is {status}. Either a rank, or MPI in it, ended the job with that status, "
            f"and lines above may say why; or a rank died by {describe_signal(number)}.{shared_memory_hint()}")


def describe_signal(number: int) -> str:
    """Describe a signal and what it usually means, for the end of a sentence."""
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    hint = {
        "SIGKILL": "; out of memory is a common cause: choose smaller sizes",
        "SIGSEGV": "; a compiled library, such as MPI or NumPy, is where this happens",
        # 6, 7 and 14 become 15 when a launcher mixes in the 9 of the ranks that it then kills.
        "SIGTERM": ", or by signal 6 (SIGABRT), 7 (SIGBUS) or 14 (SIGALRM: it waited too long for others while the job "
                   "came up or ended), which a launcher may report as this",
        "SIGALRM": "; so a rank of Shardlab's programs ends if it waited too long for others while the job came up or "
                   "ended",
        "SIGBUS": "; a full disk or shared memory, or a file that is truncated or cannot be read, is a common cause",
        "SIGXFSZ": "; it wrote a file that is larger than the shell allows: `ulimit -f` shows the limit",
    }.get(name, "")
    return f"signal {number} ({name}){hint}"


def shared_memory_hint() -> str:
    """Return sentences if ranks here cannot share memory, or have little of it: ranks then die by various signals."""
    sentence, advice = shared_memory_here()
    return advice and f" This may be a cause: {sentence} {advice}"


def shared_memory_here() -> tuple[str, str]:
    """Return a sentence about the memory that ranks share, and advice if there is little of it."""
    folder, largest = os.path.dirname(SHARED_MEMORY), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if 0 <= largest < LARGEST_FILE:
        return (f"Files may have at most {bytes_of(largest)} here (`ulimit -f`), also those of shared memory "
                f"in {folder}.", "Start this with a higher limit: `ulimit -f unlimited`.")
    if error := shared_memory_error():
        return (f"Ranks on this machine share memory in {folder}, but it cannot be written: {error}.",
                f"Some MPIs cannot start without it. Make it: `mount -t tmpfs -o size=1g tmpfs {folder}`.")
    try:
        status = os.statvfs(folder)
    except OSError:
        return f"This system has no {folder}: shared memory is not limited in this way.", ""
    size, left = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bavail))
    return (f"Ranks on this machine share memory in {folder}, which has {bytes_of(size)}, {bytes_of(left)} free.",
            "" if left >= ENOUGH_SHARED else
            f"That is little: 8 ranks may need {bytes_of(ENOUGH_SHARED)}. Ranks that find too little send by MPI, "
            "which is slower, or die. Give it 1 GB: `docker run --shm-size 1g` for a container, "
            f"`mount -o remount,size=1g {folder}` for a machine; or remove what earlier programs left there.")
