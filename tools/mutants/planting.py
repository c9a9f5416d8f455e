"""Mutants in living processes, this one and the ranks of its pools; and the lines that a test runs on either."""
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from mpi_impl.launch.pool import Pool
from tests.planted import Bug, changed_codes, planted_codes
from tools.mutants.operators import ROOT, Mutant, mutated

PACKAGES = ("reference", "mpi_impl", "shardlab")
Lines = dict[str, set[int]]     # by path


@cache
def plant(mutant: Mutant) -> Any:
    """Plant a mutant in this process, for good; what functions have cached is forgotten. Raises StaleBug."""
    codes = changed_codes(Bug(mutant.module, mutant.before, mutant.after), *mutated(mutant))
    forget_results()
    planted = planted_codes(mutant.module, codes)
    planted.__enter__()
    return planted      # which takes the mutant out again when it is no longer needed: the cache keeps it


def forget_results() -> None:
    """Empty the caches of functions, but for those that hold compiled kernels."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES) and not name.startswith("mpi_impl.kernels"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def plant_everywhere(mutant: Mutant) -> None:
    """Plant a mutant in this process, and on all ranks that it will call."""
    plant(mutant)
    run = Pool.run
    Pool.run = lambda pool, n, *call, **limit: run(pool, n, mutated_run, mutant, *call, **limit)  # type: ignore


def mutated_run(group, mutant: Mutant, function: Callable, *args):
    """Run `function(group, *args)` on a rank of a pool, with the mutant planted there."""
    __tracebackhide__ = True
    plant(mutant)
    return function(group, *args)


# ---- lines ----------------------------------------------------------------------------------------------------------


@contextmanager
def observed_everywhere() -> Iterator[Lines]:
    """Collect the lines that this process and the ranks run within the `with` block."""
    lines, run = Lines(), Pool.run

    def add(others: Lines) -> None:
        for path, numbers in others.items():
            lines.setdefault(path, set()).update(numbers)

    def observed_pool(pool: Pool, n: int, function: Callable, *args, timeout: float = 30.0) -> list:
        found = run(pool, n, observed_run, function, *args, timeout=4 * timeout)
        for _, others in found:
            add(others)
        return [result for result, _ in found]

    with mock.patch.object(Pool, "run", observed_pool), observed() as here:
        yield lines
    add(here)


def observed_run(group, function: Callable, *args):
    """Run `function(group, *args)` on a rank of a pool. Return its result and the lines that it ran."""
    with observed() as lines:
        return function(group, *args), lines


@contextmanager
def observed() -> Iterator[Lines]:
    """Collect the lines of our packages that this thread, and those it starts, run within the `with` block."""
    root, lines = f"{ROOT}/", Lines()
    wanted: dict[str, Any] = {}

    def enter(frame, event, argument):
        path = frame.f_code.co_filename
        if path not in wanted:
            inside = path.startswith(root) and path[len(root):].startswith(PACKAGES)
            wanted[path] = lines.setdefault(path[len(root):], set()) if inside else None
        return collect if wanted[path] is not None else None

    def collect(frame, event, argument):
        if event == "line":
            wanted[frame.f_code.co_filename].add(frame.f_lineno)
        return collect

    before = sys.gettrace()
    sys.settrace(enter)
    threading.settrace(enter)
    try:
        yield lines
    finally:
        sys.settrace(before)
        threading.settrace(None)    # type: ignore[arg-type]
