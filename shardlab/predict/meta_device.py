"""The device of arrays without data: it counts the bytes that live, and the seconds that a profile's device would take.

Arrays live for as long as a name refers to them, as CuPy's do, so the peak is that of the program itself. (CuPy's pool
rounds each array up to 512 bytes, and libraries have workspaces of their own: neither is counted.)
"""
import sys
from collections import Counter
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from reference.costs.hardware import Hardware

ROOT = Path(__file__).parents[2]
BELOW = ("shardlab/predict/meta", "mpi_impl/runtime/", "mpi_impl/kernels/", "mpi_impl/comm/", "reference/ops.py",
         "reference/layers/online_softmax.py")


class Origin(NamedTuple):
    """The place where an array was made."""

    kind: str       # 'parameters', 'gradients', ... for arrays that were given a name; else ""
    line: str       # of the program: 'mpi_impl/layers/mlp.py:14'
    during: int     # the number of the action of the schedule, 0 before the first


class MemoryPeak(NamedTuple):
    """The arrays that lived when they were most."""

    size: int                   # bytes
    sites: dict[Origin, int]      # bytes of the arrays of each place
    during: int                 # the number of the action that was under way


class MetaDevice:
    """A device of which there are only the figures."""

    def __init__(self, hardware: Hardware | None = None, cudnn: bool = False):
        """Take no time without a profile. `cudnn` says whether attention is cuDNN's where it can be."""
        self.hardware, self.cudnn = hardware, cudnn
        self.seconds = 0.0              # of work so far
        self.action = 0                 # the number of the one under way
        self.live = 0                   # bytes
        self.sites: Counter[Origin] = Counter()
        self.peak = MemoryPeak(0, {}, 0)

    @cached_property
    def host(self) -> "MetaDevice":
        """Return the memory of the host, which computes nothing."""
        return MetaDevice()

    # ---- memory ----

    def add(self, site: Origin, size: int) -> None:
        """Count an array that was made."""
        self.live += size
        self.sites[site] += size

    def remove(self, site: Origin, size: int) -> None:
        """Count an array that is gone. Only here can a peak be over."""
        if self.live > self.peak.size:
            self.see_peak()
        self.live -= size
        self.sites[site] -= size
        if not self.sites[site]:
            del self.sites[site]

    def see_peak(self) -> None:
        self.peak = MemoryPeak(self.live, dict(self.sites), self.action)

    def restart(self) -> None:
        """Forget the peak so far, and the time."""
        self.see_peak()
        self.seconds = 0.0

    def most(self) -> MemoryPeak:
        """Return the peak since the last restart."""
        if self.live > self.peak.size:
            self.see_peak()
        return self.peak

    # ---- time ----

    def multiply(self, n: int, k: int, m: int, times: int = 1) -> None:
        """Take the time of [n, k] @ [k, m], this many times."""
        if self.hardware and n * k * m:
            self.seconds += times * self.hardware.product(n, k, m)

    def attend(self, flops: float, backward: bool) -> None:
        """Take the time of attention's own products."""
        if self.hardware:
            self.seconds += flops / (self.hardware.peak * self.hardware.attention[backward])

    def stream(self, size: float) -> None:
        """Take the time in which this many bytes go through memory."""
        if self.hardware:
            self.seconds += size / self.hardware.bandwidth


# ---- lines of the program -------------------------------------------------------------------------------------------

@cache
def path_of(code) -> str:
    """Return the path of a code object in the project; "" for what is below the program's own lines, or outside."""
    path = Path(code.co_filename)
    inside = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return "" if inside.startswith((*BELOW, ".venv")) else inside


def line_of_caller() -> str:
    """Return the innermost line under way that is no kernel's and no collective's."""
    frame = sys._getframe(2)
    while not path_of(frame.f_code) and frame.f_back:
        frame = frame.f_back
    return f"{path_of(frame.f_code)}:{frame.f_lineno}"
