"""A bar on a terminal; elsewhere, as in the log of a job, a line now and then."""
import sys
import time
from typing import TextIO

WIDTH = 30          # characters of the bar
REDRAWN = 0.2       # seconds: a terminal
REPEATED = 30.0     # seconds: a log


class Progress:
    """The progress of a piece of work: `with Progress("encoding", total_bytes) as bar: bar.advance(bytes)`."""

    def __init__(self, what: str, total: int, out: TextIO | None = None):
        self.what, self.total, self.done = what, total, 0
        self.out = sys.stdout if out is None else out
        self.on_terminal = self.out.isatty()
        self.began = time.monotonic()
        self.shown = self.began

    def __enter__(self) -> "Progress":
        if self.on_terminal:
            self.show()
        return self

    def advance(self, size: int) -> None:
        """Count `size` more bytes as done."""
        self.done += size
        if time.monotonic() - self.shown >= (REDRAWN if self.on_terminal else REPEATED):
            self.show()

    def __exit__(self, *_) -> None:
        if self.on_terminal:
            self.out.write("\r\x1b[K")      # what is said next takes its place
            self.out.flush()

    def show(self) -> None:
        self.shown = time.monotonic()
        share = min(1.0, self.done / self.total) if self.total else 1.0
        speed = self.done / max(self.shown - self.began, 1e-9)      # of this run, bytes per second
        left = f", {(self.total - self.done) / speed:,.0f} s left" if self.done else ""
        line = f"{share:4.0%} of {self.total / 1e6:,.1f} MB, {speed / 1e6:,.1f} MB/s{left}"
        if self.on_terminal:
            full = round(WIDTH * share)
            self.out.write(f"\r\x1b[K{self.what} [{'#' * full}{' ' * (WIDTH - full)}] {line}")
        else:
            self.out.write(f"{self.what}: {line}\n")
        self.out.flush()
