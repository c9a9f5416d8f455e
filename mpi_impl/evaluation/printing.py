"""The output of an evaluation: lines for a person, on rank 0, and JSON lines for a program."""
import json
import time
from collections.abc import Callable
from typing import TextIO

from mpi_impl.reports.metrics import duration
from mpi_impl.runtime.files import open_for_writing, writing

PAUSE = 10.0     # seconds between two reports of progress


class Reporter:
    """A printer and writer of results, on the rank that `speaks`; on others it does nothing."""

    def __init__(self, path: str | None, speaks: bool):
        self.path, self.speaks = path if speaks else None, speaks
        self.file: TextIO | None = None

    def say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)

    def write(self, **values) -> None:
        """Write a line, the first of which empties the file."""
        if self.path:
            self.file = self.file or open_for_writing(self.path)
            with writing(self.path):
                print(json.dumps(values), file=self.file, flush=True)

    def progress(self, samples: int, name: str) -> Callable[[int], None]:
        """Return a function that reports the number of samples done."""
        began = reported = time.perf_counter()

        def report(done: int) -> None:
            nonlocal reported
            now = time.perf_counter()
            if now - reported >= PAUSE:
                reported = now
                left = (now - began) / done * (samples - done)
                self.say(f"{done:>7,} of {samples:,} {name} | {duration(left)} left")

        return report
