"""The resident memory of a rank, as the system or the GPU's pool reports it, next to the forecast."""
import contextlib
import ctypes
import re
import resource
import sys
from collections.abc import Sequence

from mpi_impl.comm.group import Group
from mpi_impl.runtime.arrays import on_device
from mpi_impl.runtime.tables import bytes_of
from shardlab.report.forecast import Forecast


class ResidentMemory:
    """The memory in use since this was made: before the model is."""

    def __init__(self, like):
        """Begin to count. `like` is an array of the rank's library, even an empty one."""
        self.on_device = on_device(like)
        forget_freed()
        self.before = resident()

    @property
    def bytes(self) -> int:
        """Return the peak until now: of CuPy's pool, which keeps freed memory; or of the process beyond what it had
        before.

        Memory that ranks share counts for each of them.
        """
        if self.on_device:
            import cupy
            return cupy.get_default_memory_pool().total_bytes()
        return most_resident() - self.before

    @property
    def what(self) -> str:
        return "CuPy's pool" if self.on_device else "resident memory beyond that before the model"


def forget_freed() -> None:
    """Return freed memory to the system if possible (keep_freed_memory in rank_environment.py), and reset the recorded
    peak: a process that has trained a tokenizer had a lot.
    """
    with contextlib.suppress(AttributeError, OSError):      # another C library, another system
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")                                 # the most resident pages: man 5 proc


def resident() -> int:
    """Return the bytes of memory that this process has now; if the system does not tell, its peak."""
    return status("VmRSS") or most_resident()


def most_resident() -> int:
    """Return the peak of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return status("VmHWM") or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def status(name: str) -> int:
    """Return the bytes that Linux reports under this name; 0 elsewhere."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        found = re.search(rf"^{name}:\s+(\d+) kB$", file.read(), re.MULTILINE)
        return 1024 * int(found[1]) if found else 0
    return 0


def describe(world: Group, resident: ResidentMemory, forecast: Sequence[Forecast], verified: bool = False) -> str:
    """Describe the fullest rank's forecast, as Megatron's report_theoretical_memory, and the actual peak.

    Called by all ranks. `verified`: whether rank 0 has the textbook's run in its memory, too.
    """
    most, fullest = max(world.allgather_objects(resident.bytes)), max(forecast, key=lambda one: one.total)
    return (f"theoretical memory of the fullest rank: {bytes_of(fullest.states)} of parameters, gradients and moments, "
            f"{bytes_of(fullest.activations)} of activations, {bytes_of(fullest.total)} in all; taken until now: at "
            f"most {bytes_of(most)} ({resident.what}{', the textbook of --verify included' * verified})")
