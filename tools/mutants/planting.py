"""Mutants in living processes: in this one, and on the ranks of its pools, which need not start again.

It also records which lines a test runs, here and on ranks: a mutant needs only the tests that run its line.
"""
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from mpi_impl.launch.pool import Pool, RankFailure
from tests.planted import Bug, changed_codes, planted_codes
from tools.mutants.operators import ROOT, Mutant, mutated

HANGS = 8.0                 # seconds, after which a run on ranks counts as hanging
PACKAGES = ("reference", "mpi_impl")
Lines = dict[str, set[int]]     # by path


class OutOfTime(BaseException):
    """A mutant that made something hang. Not an Exception: hypothesis would run it again, and again hang."""


@lru_cache(2)
def codes_of(mutant: Mutant) -> dict:
    return changed_codes(Bug(mutant.module, mutant.before, mutant.after), *mutated(mutant))


@contextmanager
def planted_mutant(mutant: Mutant | None) -> Iterator[None]:
    """Plant a mutant, or none, in this process, and forget what functions have cached, before it and after."""
    forget_results()
    try:
        if mutant:
            with planted_codes(mutant.module, codes_of(mutant)):
                yield
        else:
            yield
    finally:
        forget_results()


def forget_results() -> None:
    """Empty the caches of functions, but for those that hold compiled kernels."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES) and not name.startswith("mpi_impl.kernels"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def mutated_run(group, mutant: Mutant | None, function, *args):
    """Run `function(group, *args)` on a rank of a pool, with the mutant planted there."""
    __tracebackhide__ = True
    with planted_mutant(mutant):
        return function(group, *args)


def observed_run(group, function, *args):
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


class Ranks:
    """Every pool of this process, while its runs are mutated or observed."""

    def __init__(self):
        self.mutant: Mutant | None = None
        self.lines: Lines | None = None
        self.run = Pool.run

    def install(self) -> None:
        ranks = self

        def run(pool: Pool, n: int, function, *args, timeout: float = 30.0) -> list:
            return ranks.run_on(pool, n, function, *args, timeout=timeout)
        Pool.run = run      # type: ignore[method-assign]

    def run_on(self, pool: Pool, n: int, function, *args, timeout: float) -> list:
        if self.lines is not None:
            found = self.run(pool, n, observed_run, function, *args, timeout=4 * timeout)
            for _, lines in found:
                for path, numbers in lines.items():
                    self.lines.setdefault(path, set()).update(numbers)
            return [result for result, _ in found]
        begin, limit = time.monotonic(), min(timeout, HANGS)
        try:
            return self.run(pool, n, mutated_run, self.mutant, function, *args, timeout=limit)
        except RankFailure as failure:
            stuck = any(answer.what == "stuck" for answer in failure.answers)
            if stuck and time.monotonic() - begin >= limit < timeout:
                raise OutOfTime from failure
            raise

    @contextmanager
    def planted(self, mutant: Mutant | None) -> Iterator[None]:
        """Plant a mutant here and in all runs on ranks, for the duration of the `with` block; or none."""
        self.mutant = mutant
        try:
            with planted_mutant(mutant):
                yield
        finally:
            self.mutant = None

    @contextmanager
    def observed(self) -> Iterator[Lines]:
        """Collect the lines that this process and the ranks run within the `with` block."""
        self.lines = {}
        try:
            with observed() as here:
                yield self.lines
        finally:
            for path, numbers in here.items():
                self.lines.setdefault(path, set()).update(numbers)
            self.lines = None
