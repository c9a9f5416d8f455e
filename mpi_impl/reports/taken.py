"""The memory that a rank has really taken, as the system or the GPU's pool says, beside the forecast."""
import contextlib
import ctypes
import re
import resource
import sys
from collections.abc import Sequence

from mpi_impl.comm.group import Group
from mpi_impl.reports.forecast import Forecast
from mpi_impl.runtime.arrays import on_device
from mpi_impl.runtime.tables import bytes_of


class Taken:
    """Counts from where it is made: before the model is."""

    def __init__(self, like):
        """`like` is an array of the rank's library, if only an empty one."""
        self.on_device = on_device(like)
        forget_freed()
        self.before = resident()

    @property
    def bytes(self) -> int:
        """The most until now: what CuPy's pool has got of the GPU, which it keeps for what comes next; else what the
        process has had at once beyond what it had before. Memory that ranks share counts for each of them.
        """
        if self.on_device:
            import cupy
            return cupy.get_default_memory_pool().total_bytes()
        return most_resident() - self.before

    @property
    def what(self) -> str:
        return "CuPy's pool" if self.on_device else "resident memory beyond what there was before the model"


def forget_freed() -> None:
    """Where that is possible, give the system what the process has freed and kept (keep_freed_memory in
    rank_environment.py), and let it forget how much that was: who trained a tokenizer had a lot.
    """
    with contextlib.suppress(AttributeError, OSError):      # another C library, another system
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")                                 # the most resident pages: man 5 proc


def resident() -> int:
    """Bytes of memory that this process has now; where the system does not say, the most that it ever had."""
    return status("VmRSS") or most_resident()


def most_resident() -> int:
    """The most that it has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return status("VmHWM") or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def status(name: str) -> int:
    """Bytes that Linux has under this name; 0 elsewhere."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        found = re.search(rf"^{name}:\s+(\d+) kB$", file.read(), re.MULTILINE)
        return 1024 * int(found[1]) if found else 0
    return 0


def told(world: Group, taken: Taken, forecast: Sequence[Forecast], verified: bool = False) -> str:
    """Of the fullest rank, as Megatron's report_theoretical_memory, and what the fullest took; called by all ranks.
    `verified`: whether rank 0 has the textbook's run in its memory, too.
    """
    most, fullest = max(world.allgather_objects(taken.bytes)), max(forecast, key=lambda one: one.total)
    return (f"theoretical memory of the fullest rank: {bytes_of(fullest.states)} of parameters, gradients and moments, "
            f"{bytes_of(fullest.activations)} of activations, {bytes_of(fullest.total)} in all; taken until now: at "
            f"most {bytes_of(most)} ({taken.what}{', the textbook of --verify included' * verified})")
