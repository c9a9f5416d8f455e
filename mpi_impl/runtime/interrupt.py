"""Ctrl-C while a command still imports: it ends with one word instead of a traceback of imports."""
import os
import signal
import sys
from typing import NoReturn

COMMANDS = {"shardlab", "mpi_impl.launch"}     # after `python -m`


def end_until_ready() -> None:
    """Let Ctrl-C end this process, if it is a command that starts, until `ready` is called."""
    if os.path.basename(sys.argv[0]) == "shardlab" or sys.argv[0] == "-m" and COMMANDS & set(sys.orig_argv):
        replace(signal.default_int_handler, end)


def ready() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which is handled from here on."""
    replace(end, signal.default_int_handler)


def replace(handler, new) -> None:
    """Set a new handler of SIGINT if this one is there: a signal that a shell has its jobs ignore stays ignored."""
    if signal.getsignal(signal.SIGINT) is handler:
        signal.signal(signal.SIGINT, new)


def end(*_) -> NoReturn:
    """Handle the signal."""
    os.write(2, b"Interrupted.\n")
    os._exit(130)
