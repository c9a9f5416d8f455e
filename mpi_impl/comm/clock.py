"""The clocks of a rank: the wall's, and one that reads as if every rank had a device of its own."""
import time
from collections import defaultdict, deque
from contextlib import contextmanager, nullcontext
from statistics import median

from reference.comm.ring import Link
from reference.schedules.actions import Action, Times


class WallClock:
    """Seconds since the clock was started."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """Set the clock to 0."""
        self.origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def computing(self, action: Action):
        """Mark the `with` block as an action of a schedule."""
        return nullcontext()

    def pause(self) -> None:
        """Note that communication begins."""

    def resume(self) -> None:
        """Note that communication is over."""


class DeviceClock(WallClock):
    """The wall's clock, read when the rank's GPU has done what it was given: without that, the host is far ahead.

    Every reading waits for the current stream, so this is for a step that somebody wants to look at.
    """

    def now(self) -> float:
        import cupy
        cupy.cuda.get_current_stream().synchronize()
        return super().now()


INFINIBAND = Link()


class VirtualClock:
    """The time on a device of the rank's own, although ranks share cores (a logical clock: Lamport 1978).

    It advances by the CPU time of the rank's own computation. Communication, and waits for a core, do not count. A
    message that arrives sets the clock to the sender's time plus the link's, if that is later; a collective sets all
    its members to the latest of them, plus its own time. Group reports both.

    An action of a schedule takes the median time of such actions so far: on a device of its own it would take the same
    time every time, but here it sometimes takes twice as long, when a neighbour empties the cache. (The clock never
    goes back behind a time that it has told: an action with collectives inside keeps its length.)

    With `times`, which fakes the devices too, every action takes the given time, and other computation takes none.
    """

    def __init__(self, link: Link = INFINIBAND, times: Times | None = None, memory: int = 51):
        """Take medians of the last `memory` actions of a kind. With 1, each takes its own time."""
        self.link, self.times = link, times
        self.recent: dict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=memory))
        self.restart()

    def restart(self) -> None:
        """Set the clock to 0."""
        self.seconds = self.busy = self.last_told = 0.0     # now; computed so far; the last time that was told
        self.mark = time.thread_time()

    def now(self) -> float:
        self.advance()
        return self.tell()

    def tell(self) -> float:
        """Return the time of the last pause, for others."""
        self.last_told = self.seconds
        return self.seconds

    @contextmanager
    def computing(self, action: Action):
        """Mark the `with` block as an action of a schedule."""
        if self.times is not None:
            yield
            self.seconds += self.times.of(action)
            return
        self.advance()
        before = self.busy
        yield
        self.advance()
        took = self.busy - before
        recent = self.recent[action.stage, action.kind]
        recent.append(took)
        self.seconds = max(self.last_told, self.seconds + median(recent) - took)

    def advance(self) -> None:
        """Count the computation until now."""
        self.pause()
        self.resume()

    def pause(self) -> None:
        """Count the computation until now: communication begins."""
        if self.times is None:
            computed = time.thread_time() - self.mark
            self.seconds += computed
            self.busy += computed

    def resume(self) -> None:
        """Go on counting after communication, whose own CPU time does not count."""
        self.mark = time.thread_time()

    def reach(self, seconds: float) -> None:
        """Advance to the time at which something that the rank waits for arrives; it may be past."""
        self.seconds = self.last_told = max(self.seconds, seconds)


TICK = 1e-6         # seconds, which a page shows as a microsecond


class TickingLink(Link):
    """A link on which a message between two ranks takes a tick, and a collective nothing."""

    def seconds(self, operation: str, ranks: int, size: float) -> float:
        return TICK if operation == "send" else 0.0


class TickingClock(VirtualClock):
    """A clock that ticks when its rank records a tensor, and not otherwise: it reads the same in every run.

    Messages set it as they set any virtual clock. A collective takes no time, so a run that lacks one keeps in step
    with a run that has it.
    """

    def __init__(self):
        super().__init__(TickingLink())

    def computing(self, action: Action):
        return nullcontext()

    def pause(self) -> None:
        """Count no computation."""

    def tick(self) -> None:
        """Count one tensor."""
        self.seconds += TICK


Clock = WallClock | VirtualClock
