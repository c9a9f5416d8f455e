"""The output of a launcher and its ranks, without the banner that some add if a rank dies, for we say more."""
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator
from functools import partial

from mpi_impl.launch.entry import drop_output, say
from mpi_impl.launch.guard import ENDS

BANNER = b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"     # when all ranks have ended
SECONDS_TO_END = 1.0        # for the last output, once the launcher has ended


class Output(threading.Thread):
    """Passes on what a launcher prints, as it comes, and ends the launcher if that cannot be printed."""

    def __init__(self, launcher: subprocess.Popen) -> None:
        super().__init__(daemon=True)
        self.launcher = launcher
        self.failure: OSError | None = None
        self.banner = b""

    def start(self) -> None:
        """Start with the signals that end a job blocked: they are for the main thread, which blocks them at times."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        super().start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(self) -> None:
        assert self.launcher.stdout is not None
        blocks = iter(partial(os.read, self.launcher.stdout.fileno(), 1 << 16), b"")
        try:
            for block, self.banner in without_banner(blocks):
                while block:
                    block = block[os.write(1, block):]
        except OSError as error:
            self.failure = error
            self.launcher.terminate()

    def finish(self) -> OSError | None:
        """Wait for the last of it, and return the error with which it could not be printed, if there was one."""
        self.join(SECONDS_TO_END)       # a process that is left behind may hold it open
        return self.failure


def say_lost(failure: OSError) -> None:
    """Say why what the ranks print is lost."""
    if isinstance(failure, BrokenPipeError):    # the reader of the output has left, as `head` does
        drop_output()
    else:
        say(f"error: the launcher cannot print what ranks say: {failure.strerror}. The job has been ended: send its "
            "output where there is room.")


def without_banner(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the output before the banner, without delay, and what has come of the banner itself.

    Only what may begin the banner is held back.
    """
    held = banner = b""
    for block in blocks:
        if banner:
            banner += block     # read on, so that the launcher can end
            continue
        text, banner, rest = (held + block).partition(BANNER)
        keep = len(text) if banner else len(text) - len(beginning(text))
        yield text[:keep], banner
        held, banner = text[keep:], banner + rest
    yield held, banner


def beginning(text: bytes) -> bytes:
    """Return the end of a text with which the banner may begin: its last line, or its last two, or nothing."""
    *_, before, last = [b"", *text.split(b"\n")]
    return next((end for end in (before + b"\n" + last, last) if BANNER.startswith(end)), b"")
