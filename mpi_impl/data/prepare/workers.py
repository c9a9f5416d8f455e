"""A pool of processes for many cores: they take one task after another, and leave no orphan behind."""
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from reference.errors import UserError


def map_in_order(function: Callable[..., Any], workers: int, *arguments: Iterable) -> Iterator[Any]:
    """Map `function` over the arguments with `workers` processes; results come in order, and so does the first error.

    Raises UserError if a process is ended from outside.
    """
    if workers == 1:
        yield from map(function, *arguments)
        return
    # Processes are started afresh: a copy of this one would have copies of threads' locks, but not the threads.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, context, set_up) as pool:
            yield from pool.map(function, *arguments)
    except BrokenProcessPool as error:
        raise UserError("A worker was ended from outside, most likely because memory ran out. Run the same command "
                        f"again, with fewer --workers than {workers}: it continues where this run ended.") from error


def set_up() -> None:
    """Set up each process: one core, interruptions left to its parent, and an end with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
