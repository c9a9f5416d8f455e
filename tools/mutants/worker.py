"""A pytest session that collects the tests once and then, mutant after mutant, runs those that execute its line.

`python -m pytest -p tools.mutants.worker --mutants FOLDER tests...`, as `python -m tools.mutants` starts it: FOLDER has
`queue.json`, the mutants; `lines.json`, the lines of each test; and `results.jsonl`, to which each result is added.
"""
import hashlib
import json
import os
import resource
import signal
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tests.planted import StaleBug
from tools.mutants.operators import ROOT, Mutant
from tools.mutants.planting import OutOfTime, Ranks

SLOW = 8.0              # seconds: a test that takes longer is left out
MEMORY = 6 << 30        # bytes of each process: some mutants ask for all there is
SPOILED = 3             # exit status: a mutant has left something behind, and the tests need a new process


def pytest_addoption(parser):
    parser.addoption("--mutants", help="the folder of the queue and the results")
    parser.addoption("--budget", type=float, help="seconds of tests for one mutant, after which it has survived")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Draw the same examples in every run, and stop at the first that fails."""
    settings.register_profile("mutants", settings.get_profile("fast"), derandomize=True, database=None,
                              phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
    settings.load_profile("mutants")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    worker = Worker(session, Path(session.config.getoption("mutants")))
    worker.measure()
    for fields in json.loads((worker.folder / "queue.json").read_text()):
        worker.try_mutant(Mutant(*fields))
    return True


class Worker:
    """The tests of a session, and what is known of each."""

    def __init__(self, session, folder: Path):
        self.session, self.folder, self.ranks = session, folder, Ranks()
        self.ranks.install()
        self.planted: Any = None        # what the fixtures of files were made under
        self.tests = {f"{os.path.relpath(item.path, ROOT)}::{item.nodeid.partition('::')[2]}": item
                      for item in session.items}
        self.known: dict[str, Any] = read(folder / "lines.json")
        self.kills: dict[tuple[str, str], int] = defaultdict(int)       # by test and file
        for result in results(folder):
            if result.get("test"):
                self.kills[result["test"], result["path"]] += 1

    def measure(self) -> None:
        """Find out the lines and the time of each test that is new, or whose lines have changed."""
        sums: dict[str, str] = {}
        new = [name for name in self.tests if not still_true(self.known.get(name), sums)]
        for count, name in enumerate(new):
            say(self.folder, f"measuring {count + 1} of {len(new)}: {name}")
            with self.ranks.observed() as lines:
                passed = self.passes(name, limit=300, planted=name)
            begin = time.monotonic()
            passed = passed and self.passes(name, limit=60)
            files = {path: sorted(numbers) for path, numbers in lines.items() if numbers}
            self.known[name] = {"passed": passed, "seconds": time.monotonic() - begin, "lines": files,
                                "sums": {path: checksum(path) for path in [name.split("::")[0], *files]}}
            if count % 50 == 49 or count == len(new) - 1:
                write(self.folder / "lines.json", self.known)
        say(self.folder, "")

    def try_mutant(self, mutant: Mutant) -> None:
        """Run the tests of a mutant until one fails, and note the result."""
        begin = time.monotonic()
        note(self.folder, mutant, "begun")
        result, test, tried, tests = "survived", "", 0, self.tests_of(mutant)
        try:
            for test in tests:
                tried += 1
                result = self.outcome(mutant, test)
                if result != "survived" or time.monotonic() - begin > self.session.config.getoption("budget"):
                    break
        except StaleBug:
            result = "not planted"
        if result in ("killed", "hung"):
            if not self.passes(test, limit=60):
                note(self.folder, mutant, "spoiled")
                os._exit(SPOILED)
            self.kills[test, mutant.path] += 1
        note(self.folder, mutant, result if tests else "not run", test=test if result in ("killed", "hung") else "",
             tried=tried, tests=len(tests), seconds=round(time.monotonic() - begin, 2))

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the mutant's statement, the most promising first: one of each test function, then
        the next of each. Those come first that are quick, have killed others of the file, and run little else.
        """
        lines = range(mutant.statement, mutant.line + 1)

        def cost(name: str) -> float:
            known = self.known[name]
            share = len(known["lines"][mutant.path]) / sum(map(len, known["lines"].values()))
            return (0.1 + known["seconds"]) / ((0.2 + self.kills[name, mutant.path]) * share)

        names = sorted((name for name in self.tests if (known := self.known[name])["passed"] and known["seconds"] < SLOW
                        and not set(lines).isdisjoint(known["lines"].get(mutant.path, ()))), key=cost)
        turns = Counter[str]()
        places = {}
        for name in names:
            function = name.partition("[")[0]
            places[name] = turns[function]
            turns[function] += 1
        return sorted(names, key=places.__getitem__)

    def outcome(self, mutant: Mutant, test: str) -> str:
        try:
            with self.ranks.planted(mutant):
                limit = max(10.0, 5 * self.known[test]["seconds"])
                return "survived" if self.passes(test, limit, planted=mutant) else "killed"
        except OutOfTime:
            return "hung"

    def passes(self, name: str, limit: float, planted=None) -> bool:
        """Run a test. Raises OutOfTime at the limit of seconds, wherever it is.

        The pool of ranks stays up from one test to the next, and so do the fixtures of a test's file, but those that
        were made under another mutant are made again.
        """
        item = self.tests[name]
        stale = planted != self.planted and has_fixtures_of_file(item)
        self.session._setupstate.teardown_exact(self.session if stale else item.parent)
        self.planted = planted
        hung = []
        with alarm(limit):
            for report in runtestprotocol(item, log=False, nextitem=item.parent):
                if report.failed:
                    hung.append("OutOfTime" in str(report.longrepr))
        if any(hung):
            raise OutOfTime
        return not hung


def has_fixtures_of_file(item) -> bool:
    """Report whether a test uses a fixture that others of its file share, the small pools excepted."""
    found = item._fixtureinfo.name2fixturedefs
    return any(definitions[-1].scope == "module" for name, definitions in found.items() if name != "small_pools")


@contextmanager
def alarm(seconds: float):
    """Raise OutOfTime in this thread after this many seconds."""
    def ring(*_):
        raise OutOfTime
    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


# ---- files ----------------------------------------------------------------------------------------------------------


def checksum(path: str) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:16]


def still_true(known: dict | None, sums: dict[str, str]) -> bool:
    """Report whether a test and all files that it runs are as they were when it was measured."""
    for path in known["sums"] if known else ():
        if path not in sums:
            sums[path] = checksum(path) if (ROOT / path).exists() else ""
    return known is not None and all(sums[path] == value for path, value in known["sums"].items())


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, content) -> None:
    aside = path.with_suffix(".aside")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def results(folder: Path) -> list[dict]:
    """Return all that was noted, from the oldest on."""
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(folder: Path, mutant: Mutant, result: str, **more) -> None:
    found = {"name": mutant.name, "path": mutant.path, "line": mutant.line, "operator": mutant.operator,
             "sum": checksum(mutant.path), "result": result}
    with open(folder / "results.jsonl", "a") as file:
        file.write(json.dumps(found | more) + "\n")


def say(folder: Path, text: str) -> None:
    (folder / "progress.txt").write_text(text)
