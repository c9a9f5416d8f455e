"""Reports of an evaluation's progress."""
import time
from collections.abc import Callable

from shardlab.report.metrics import duration

PAUSE = 10.0     # seconds between two reports


def report_progress(samples: int, name: str, say: Callable[[str], None]) -> Callable[[int], None]:
    """Return a function that is told the number of samples done, and says it from time to time."""
    began = reported = time.perf_counter()

    def report(done: int) -> None:
        nonlocal reported
        now = time.perf_counter()
        if now - reported >= PAUSE:
            reported = now
            left = (now - began) / done * (samples - done)
            say(f"{done:>7,} of {samples:,} {name} | {duration(left)} left")

    return report
