"""A pytest session that collects the tests once and then, mutant after mutant, runs those that execute its line.

`python -m pytest -p tools.mutants.worker --mutants FOLDER tests...`, as `python -m tools.mutants` starts it: FOLDER has
`queue.json`, the mutants; `lines.json`, the lines of each test; and `results.jsonl`, to which each result is added.
A mutant lives in a fork of this process, with ranks of its own: whatever it does ends with that.
"""
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tests.planted import StaleBug
from tools.mutants.operators import ROOT, Mutant
from tools.mutants.planting import observed_everywhere, plant_everywhere

SLOW = 8.0              # seconds: a test that takes longer is left out
PATIENCE = 15.0         # seconds that a test may take, and 5 times as long as without a mutant
MEMORY = 6 << 30        # bytes of each process: some mutants ask for all there is
FORK = multiprocessing.get_context("fork")


def pytest_addoption(parser):
    parser.addoption("--mutants", type=Path, help="the folder of the queue and the results")
    parser.addoption("--budget", type=float, help="seconds of tests for one mutant, after which it has survived")
    parser.addoption("--minutes", type=float, help="after which no mutant is begun")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Draw the same examples in every run, and stop at the first that fails."""
    settings.register_profile("mutants", settings.get_profile("fast"), derandomize=True, database=None,
                              phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
    settings.load_profile("mutants")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    end, folder = time.monotonic() + 60 * session.config.getoption("minutes"), session.config.getoption("mutants")
    worker, queue = Worker(session, folder), json.loads((folder / "queue.json").read_text())
    worker.measure()
    for count, fields in enumerate(queue, 1):
        if time.monotonic() < end:
            print(f"{count} of {len(queue)}  {worker.try_mutant(Mutant(*fields))}", flush=True)
    return True


class Worker:
    """The tests of a session, and what is known of each."""

    def __init__(self, session, folder: Path):
        self.session, self.folder, self.budget = session, folder, session.config.getoption("budget")
        self.tests = {f"{os.path.relpath(item.path, ROOT)}::{item.nodeid.partition('::')[2]}": item
                      for item in session.items}
        self.known: dict[str, Any] = read(folder / "lines.json")
        self.kills: dict[tuple[str, str], int] = defaultdict(int)       # by test and file
        for result in results(folder):
            self.kills[result["test"], result["path"]] += 1

    def measure(self) -> None:
        """Find out the lines and the time of each test that is new, or whose lines have changed."""
        sums: dict[str, str] = {}
        new = [name for name in self.tests if not still_true(self.known.get(name), sums)]
        for count, name in enumerate(new, 1):
            print(f"measuring {count} of {len(new)}: {name}", flush=True)
            with observed_everywhere() as lines:
                passed = self.passes(name)
            begin = time.monotonic()
            passed = passed and self.passes(name)
            files = {path: sorted(numbers) for path, numbers in lines.items() if numbers}
            self.known[name] = {"passed": passed, "seconds": time.monotonic() - begin, "lines": files,
                                "sums": {path: checksum(path) for path in [name.split("::")[0], *files]}}
            if count % 50 == 0 or count == len(new):
                write(self.folder / "lines.json", self.known)
        self.session._setupstate.teardown_exact(None)       # which ends the ranks: a fork starts its own

    def try_mutant(self, mutant: Mutant) -> str:
        """Run the tests of a mutant until one fails, note the result, and describe it."""
        begin, tests = time.monotonic(), self.tests_of(mutant)
        answers, answer = FORK.Pipe(duplex=False)
        process = FORK.Process(target=self.run_tests, args=(mutant, tests, answer), daemon=True)
        process.start()
        answer.close()
        result, test = "survived" if tests else "not run", ""
        for test in tests:
            if not answers.poll(PATIENCE + 5 * self.known[test]["seconds"]):
                result = "hung"
            else:
                try:
                    result = answers.recv()
                except EOFError:
                    result = "crashed"
            if result != "survived" or time.monotonic() - begin > self.budget:
                break
        with suppress(ProcessLookupError):      # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        found = {"name": mutant.name, "path": mutant.path, "sum": checksum(mutant.path), "result": result,
                 "test": test if result in FOUND else "", "seconds": round(time.monotonic() - begin, 2)}
        self.kills[found["test"], mutant.path] += 1
        with open(self.folder / "results.jsonl", "a") as file:
            file.write(json.dumps(found) + "\n")
        return f"{result:11} {found['seconds']:6.1f} s  {mutant.operator:18} {mutant.path}:{mutant.line}"

    def run_tests(self, mutant: Mutant, tests: list[str], answer) -> None:
        """Run tests with a mutant, in a process of its own, and answer for each."""
        os.setpgrp()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        try:
            plant_everywhere(mutant)
            for test in tests:
                answer.send("survived" if self.passes(test) else "killed")
        except StaleBug:
            answer.send("not planted")
        finally:
            self.session._setupstate.teardown_exact(None)
            os._exit(0)     # the session is the parent's to end

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

    def passes(self, name: str) -> bool:
        """Run a test. Ranks, and the fixtures of its file, stay for the next one."""
        item = self.tests[name]
        self.session._setupstate.teardown_exact(item.parent)
        return not any([report.failed for report in runtestprotocol(item, log=False, nextitem=item.parent)])


FOUND = ("killed", "hung", "crashed")       # results of mutants that a test has noticed

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
