"""What time it is on a rank: the wall's, or what it would be if every rank had a device of its own."""
import time
from collections import defaultdict, deque
from contextlib import contextmanager, nullcontext
from statistics import median

from reference.costs.hardware import Link
from reference.schedules.actions import Action
from reference.schedules.simulate import Times


class WallClock:
    """Seconds since the clock was started."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """It is 0 now."""
        self.origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def computing(self, action: Action):
        """`with` it, an action of a schedule is done."""
        return nullcontext()

    def pause(self) -> None:
        """Communication begins."""

    def resume(self) -> None:
        """Communication is over."""


INFINIBAND = Link()


class VirtualClock:
    """The time on a device of the rank's own, although ranks share cores (a logical clock: Lamport 1978).

    It goes on by the CPU time that the rank itself computes; what the rank spends in communication and in waiting for
    a core does not count. A message that arrives sets it to the sender's time plus what the link takes, if that is
    later; a collective sets all its members to the latest of them, plus its own time. Group tells it of both.

    An action of a schedule takes what such actions usually take, the median so far: on a device of its own it would
    take the same every time, and here now and then it takes twice as long, when a neighbour empties the cache. (But the
    clock never goes back behind a time that it has told: an action with collectives inside stays as long as it was.)

    With `times`, which fakes the devices too, every action takes what they say, and no other computation takes any.
    """

    def __init__(self, link: Link = INFINIBAND, times: Times | None = None, memory: int = 51):
        """`memory`: how many actions of a kind the median is of. With 1, each takes just what it took."""
        self.link, self.times = link, times
        self.recent: dict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=memory))
        self.restart()

    def restart(self) -> None:
        """It is 0 now."""
        self.seconds = self.busy = self.told = 0.0      # now; computed so far; the last time that anyone was told
        self.mark = time.thread_time()

    def now(self) -> float:
        self.advance()
        return self.tell()

    def tell(self) -> float:
        """The time of the last pause, for others."""
        self.told = self.seconds
        return self.seconds

    @contextmanager
    def computing(self, action: Action):
        """`with` it, an action of a schedule is done."""
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
        self.seconds = max(self.told, self.seconds + median(recent) - took)

    def advance(self) -> None:
        """What was computed until now counts."""
        self.pause()
        self.resume()

    def pause(self) -> None:
        """Communication begins: what was computed until now counts."""
        if self.times is None:
            computed = time.thread_time() - self.mark
            self.seconds += computed
            self.busy += computed

    def resume(self) -> None:
        """Communication is over: its own CPU time does not count."""
        self.mark = time.thread_time()

    def reach(self, seconds: float) -> None:
        """What the rank has waited for comes at this time; if it is past, the rank did not wait."""
        self.seconds = self.told = max(self.seconds, seconds)


Clock = WallClock | VirtualClock
