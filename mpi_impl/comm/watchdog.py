"""A time limit for every wait: a rank whose neighbour has stopped, or hangs, does not wait for ever."""
import math
import threading
import time
from collections.abc import Callable, Sequence

TICK = 1.0      # seconds between two looks, at most


class Watchdog:
    """Watches one rank's waits from a thread of its own, if it has a limit."""

    def __init__(self, limit: float = math.inf, give_up: Callable[[str], object] = print):
        """After `limit` seconds in one wait, `give_up` is called in the thread, with what the rank waits for."""
        self.limit, self.give_up = limit, give_up
        self.wait: tuple[float, str, str, Sequence[int]] | None = None     # since when; and as `waiting` says
        if limit < math.inf:
            threading.Thread(target=self._watch, daemon=True).start()

    def waiting(self, group: str, reason: str, ranks: Sequence[int]) -> "Watchdog":
        """`with watchdog.waiting(...):` the rank may wait inside, for one of these `ranks` of the world.

        Every message passes here, so this is no generator, which would take four times as long.
        """
        self.wait = time.monotonic(), group, reason, ranks
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_) -> None:
        self.wait = None

    def _watch(self) -> None:
        """Sleep until the present wait's end: the rank that has waited longest is then the first to give up.

        It waits for the one that has stopped, or for one that waits for that in turn.
        """
        awake = -math.inf               # since when: for time in which it was stopped itself, a rank blames nobody
        while True:
            wait, now = self.wait, time.monotonic()
            left = self.limit if wait is None else max(wait[0], awake) + self.limit - now
            if wait is not None and left <= 0:
                self.give_up(f"{listed(wait[3])} for {self.limit:g} seconds ({wait[1]} group: {wait[2]})")
                return
            nap = min(left, TICK)
            time.sleep(nap)
            if time.monotonic() - now > nap + 5 * TICK:
                awake = time.monotonic()


def listed(ranks: Sequence[int]) -> str:
    """[3] -> 'rank 3'; [1, 3, 5] -> 'ranks 1, 3 and 5'; of many only the ends."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
