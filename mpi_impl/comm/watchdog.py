"""The watchdog: a time limit for every wait, so that no rank waits forever for one that has stopped or hangs.

Some waits may be long although all is well: rank 0 tokenizes a corpus, and the others wait for it. Then the limit is
one of silence. Each rank that takes part, at work or waiting, sends the next one a sign of life (a *heartbeat*) now and
then, from its watchdog's thread, and listens to the one before it: if a process stops, the next one hears nothing.

What ends the job is passed in: shardlab/programs/program.py gives launch/entry.py's `give_up`.
"""
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

TICK = 1.0      # seconds between two looks, at most
BEATS = 4       # heartbeats in the time of the limit


class Heartbeat(Protocol):
    """A signal that goes round in a group, from each rank to the next."""

    def beat(self) -> None:
        """Send a sign of life to the next rank."""

    def heard(self) -> bool:
        """Report whether the rank before this one has sent any since the last time."""


class Watchdog:
    """A thread that watches one rank's waits, if there is a limit."""

    def __init__(self, limit: float = math.inf, give_up: Callable[[str], object] = print):
        """Call `give_up` in the thread after `limit` seconds in one wait, with a description of the wait."""
        self.limit, self.give_up = limit, give_up
        self.wait: tuple[float, str, str, Sequence[int], bool] | None = None    # since when; and as `waiting` says
        self.heartbeats: list[Heartbeat] = []       # under way; the last one is of the innermost group
        self.lock = threading.Lock()                # held while the thread uses them
        if limit < math.inf:
            threading.Thread(target=self._watch, daemon=True).start()

    def waiting(self, group: str, reason: str, ranks: Sequence[int], while_silent: bool = False) -> "Watchdog":
        """Limit the waits inside of `with watchdog.waiting(...):`, for one of these `ranks` of the world.

        With `while_silent`, only the time without a heartbeat counts. This is not a generator, which would take four
        times as long: every message passes here.
        """
        self.wait = time.monotonic(), group, reason, ranks, while_silent
        return self

    @contextmanager
    def beating(self, heartbeat: Heartbeat) -> Iterator[None]:
        """Send heartbeats as long as this rank is inside, at work or waiting. All ranks of the group come here."""
        heartbeat.beat()
        with self.lock:
            self.heartbeats.append(heartbeat)
        try:
            yield
        finally:
            with self.lock:
                self.heartbeats.remove(heartbeat)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_) -> None:
        self.wait = None

    def _watch(self) -> None:
        """Sleep until the end of the present wait: the rank that has waited longest is then the first to give up.

        It waits for the rank that has stopped, or for one that waits for that in turn.
        """
        awake = -math.inf               # since when: for time in which it was stopped itself, a rank blames nobody
        beat = heard = -math.inf        # the last time
        while True:
            wait, now = self.wait, time.monotonic()
            with self.lock:
                if self.heartbeats and self.heartbeats[-1].heard():
                    heard = now
                if self.heartbeats and now - beat >= self.limit / BEATS:
                    beat = now
                    for heartbeat in self.heartbeats:
                        heartbeat.beat()
            left = self.limit if wait is None else max(wait[0], awake, heard if wait[4] else 0) + self.limit - now
            if wait is not None and left <= 0:
                self.give_up(f"{listed(wait[3])} for {self.limit:g} seconds ({wait[1]} group: {wait[2]})")
                return
            nap = min(left, TICK, self.limit / BEATS)
            time.sleep(nap)
            if time.monotonic() - now > nap + 5 * TICK:
                awake = time.monotonic()


def listed(ranks: Sequence[int]) -> str:
    """Return 'rank 3' for [3], 'ranks 1, 3 and 5' for [1, 3, 5], and the first and the last of many."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
