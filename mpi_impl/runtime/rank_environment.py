"""The environment of a rank's process: before NumPy and MPI load, and when they have. Standard library only.

Eight ranks on two cores, each with a BLAS that starts a thread per core, spend their time waiting for one another:
a job of small matrix products takes fifty times as long. So a rank gets one thread, and gives its core away while
it waits. All this is for ranks alone: in a notebook, or in a program started by itself, nothing is changed.
"""
import contextlib
import ctypes
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from glob import glob

from mpi_impl.runtime.mpis import KNOWN, SHARED_MEMORY, YIELDING
from mpi_impl.runtime.openblas import kernel_settings
from reference.errors import UserError

# The rank and the size of the world, as each launcher tells them to the processes it starts. The Slurm pair is
# last: ranks that mpiexec starts inside a Slurm step see it too, but there it describes the step.
LAUNCHER_VARIABLES = (
    *dict.fromkeys(mpi.rank_and_size for mpi in KNOWN),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)

# Where each BLAS looks for its number of threads: OpenBLAS, any with OpenMP, MKL, Apple's Accelerate, BLIS.
ON_TERMINAL = "SHARDLAB_ON_TERMINAL"       # set where ranks' output reaches a terminal that shows colours
THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "BLIS_NUM_THREADS",
)

# Parameters of glibc's mallopt, as <malloc.h> numbers them.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def launched_rank_and_size() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks, as its launcher says; None without a launcher."""
    for rank, size in LAUNCHER_VARIABLES:
        if is_count(os.environ.get(rank, "")) and is_count(os.environ.get(size, "")):
            return int(os.environ[rank]), int(os.environ[size])
    return None


def ranks_here() -> int:
    """Return the number of ranks on this machine, if the launcher tells it, or in all."""
    _, size = launched_rank_and_size() or (0, 1)
    told = (os.environ.get(mpi.local_size, "") for mpi in KNOWN)
    return next((int(count) for count in told if is_count(count)), size)


def environment_count(name: str, default: int) -> int:
    """Return the number that a variable holds, or the default if it is not set. Raises UserError for anything else."""
    text = os.environ.get(name, str(default))
    if not is_count(text):
        raise UserError(f"The environment variable {name} is {text!r}, but must be a whole number. Unset it, or start "
                        "this as it was meant: with mpi_impl.launch, or by Slurm.")
    return int(text)


def is_count(text: str) -> bool:
    return re.fullmatch("[0-9]{1,18}", text) is not None


def is_first_rank() -> bool:
    """Report whether this process speaks for the job. This is known before MPI starts."""
    launched = launched_rank_and_size()
    return launched is None or launched[0] == 0


def thread_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give a rank one BLAS thread, or none if the user has set any of them."""
    return {} if any(name in environment for name in THREAD_VARIABLES) else dict.fromkeys(THREAD_VARIABLES, "1")


def prepare() -> None:
    """Give a rank one BLAS thread and fast kernels, and let it yield its core; the user's own variables have the last
    word.
    """
    launched = launched_rank_and_size()
    if launched is None or "numpy" in sys.modules:  # not a rank, or too late for NumPy to see it
        return
    os.environ.update(kernel_settings() | thread_settings(os.environ) | os.environ)
    if ranks_here() > cores():  # MPIs spin while they wait: good with a core to itself, ruinous without
        os.environ.update(YIELDING | os.environ)


def cores() -> int:
    """Return the number of cores that this process may use."""
    # On Linux a batch system says which ones, and a container how many.
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(known, cores_of_container())))


def cores_of_container(path: str = "/sys/fs/cgroup/cpu.max") -> float:
    """Return how many cores' time this container gets, as by `docker run --cpus`; infinite if nothing limits it."""
    with contextlib.suppress(OSError, ValueError), open(path) as file:      # "200000 100000", or "max 100000"
        quota, period = map(int, file.read().split())
        return quota / period
    return math.inf


def keep_freed_memory() -> None:
    """Let the process keep the memory of freed arrays, where malloc is glibc's.

    By default a big array goes back to the system when it is freed, and the next one of its size has every page
    faulted in again. A training step makes and frees the same sizes again and again, and gets 6 to 25 % faster.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library, which has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)           # take big arrays from the heap, too
        mallopt(M_TRIM_THRESHOLD, -1)    # never give the heap's free end back
        mallopt(M_TOP_PAD, 64 << 20)     # grow it by 64 MiB at a time


def forget_shared_memory() -> None:
    """Take the names from the memory that ranks on one machine share, once all of them have it.

    It is a file of 4 MiB or more in /dev/shm, which is memory, too. Ranks that are killed would leave it there until
    the machine is restarted, job after job. A file without a name is gone with the last of those who have it.
    """
    remove(mapped_by("self"))


def shared_memory() -> set[str]:
    """List such files that have a name: for a moment while a job starts, or for good if it was killed then."""
    return set(glob(f"{SHARED_MEMORY}*"))


def shared_memory_left() -> float:
    """Return the bytes that are left for memory that processes share. Infinite where it does not say: a container may
    have 64 MiB of it, a machine half of all its memory.
    """
    with contextlib.suppress(OSError, AttributeError):
        found = os.statvfs(os.path.dirname(SHARED_MEMORY))
        return found.f_bavail * found.f_frsize if found.f_blocks else math.inf
    return math.inf


def shared_memory_error() -> str:
    """Return why nothing can be written where ranks share memory, or "". Only Linux has a folder for it."""
    if sys.platform == "linux":
        try:
            tempfile.TemporaryFile(dir=os.path.dirname(SHARED_MEMORY)).close()
        except OSError as error:
            return error.strerror or ""
    return ""


def forget_abandoned_memory(before: set[str]) -> None:
    """Remove those that were not there `before` the ranks were started, and that no process has now."""
    if abandoned := shared_memory() - before:       # asked first: what another job makes now is mapped immediately
        remove(abandoned.difference(*(mapped_by(pid) for pid in os.listdir("/proc") if pid.isdigit())))


def mapped_by(pid: str) -> set[str]:
    """Return those that a process has mapped; nothing if the system does not say."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        return {line.split()[5] for line in maps if SHARED_MEMORY in line}
    return set()


def remove(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # another rank was faster
            os.unlink(path)
