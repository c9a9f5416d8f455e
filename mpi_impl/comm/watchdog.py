"""A time limit for every wait: a rank whose neighbour has stopped, or hangs, does not wait for ever."""
import math
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager


class Watchdog:
    """Watches one rank's waits from a thread of its own, if it has a limit."""

    def __init__(self, limit: float = math.inf, give_up: Callable[[str], object] = print):
        """After `limit` seconds in one wait, `give_up(sentence)` is called, in the thread."""
        self.limit, self.give_up = limit, give_up
        self.wait: tuple[float, str, str] | None = None     # since when; in which group, and for what
        if limit < math.inf:
            threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def waiting(self, group: str, reason: str):
        """The rank may wait for others inside the `with` block."""
        self.wait = time.monotonic(), group, reason
        try:
            yield
        finally:
            self.wait = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self.limit / 10))
            wait = self.wait
            if wait is not None and time.monotonic() - wait[0] > self.limit:
                self.give_up(f"waited {self.limit:g} seconds in the {wait[1]} group for: {wait[2]}")
                return
