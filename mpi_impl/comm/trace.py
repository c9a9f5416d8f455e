"""The trace of a rank: what it did and when."""
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from mpi_impl.comm.clock import Clock, WallClock
from reference.schedules.actions import KINDS, Action, parse_action


class Slice(NamedTuple):
    """One thing that a rank did, from start to end. Slices of one stream do not overlap."""

    stream: str     # 'compute', or 'communication': waits for messages, and collectives
    name: str       # '2F0'; 'receive activation', 'gradients', 'optimizer', ...
    kind: str       # F, B, I or W for a schedule's action; 'communication' or 'other'
    start: float    # seconds on the rank's clock, which starts at 0 with a run
    end: float

    @property
    def action(self) -> Action | None:
        """Return the schedule's action, if this was one."""
        return parse_action(self.name) if self.kind in KINDS else None


class Trace:
    """The slices of a rank that is `recording`, in the order in which they ended."""

    def __init__(self, clock: Clock | None = None, recording: bool = False):
        self.clock = clock or WallClock()
        self.recording = recording
        self.slices: list[Slice] = []

    def slice(self, stream: str, name: str, kind: str):
        """Record the `with` block as one slice."""
        return self._recorded(stream, name, kind) if self.recording else nullcontext()

    @contextmanager
    def _recorded(self, stream: str, name: str, kind: str):
        start = self.clock.now()
        yield
        self.slices.append(Slice(stream, name, kind, start, self.clock.now()))
