"""The program of the bug matrix: it plants bugs, asks the detectors, and writes the results, the picture and the page.

    .venv/bin/python -m benchmarks.bug_matrix               # what is missing in the results; it can be stopped any time
    .venv/bin/python -m benchmarks.bug_matrix --write       # the picture and docs/bug_zoo.md, from the results
"""
import argparse
import sys
import time
from pathlib import Path

from benchmarks.bug_matrix import results
from benchmarks.bug_matrix.detectors import DETECTORS
from benchmarks.bug_matrix.planted_bug import CleanRuns, PlantedBug
from benchmarks.bug_matrix.verdict import SEEN
from tests import zoo
from tests.small_pools import SmallPools

CLEAN = Path("runs/bug_matrix.json")


def main() -> None:
    options = parse_options()
    known = results.read()
    if not options.write:
        wanted = [one for one in DETECTORS if not options.detector or one.name in options.detector]
        judge(todo(options, known, wanted), wanted, known, options.again)
    else:
        from benchmarks.bug_matrix import page
        page.write(known)


def parse_options() -> argparse.Namespace:
    names = [detector.name for detector in DETECTORS]
    parser = argparse.ArgumentParser(prog="benchmarks.bug_matrix", description="Plant the zoo's bugs, and ask who sees "
                                     "them. What the results have already is not done again.")
    parser.add_argument("--only", metavar="NAME", action="append", help="a bug's name, or a part of it")
    parser.add_argument("--detector", metavar="NAME", action="append", choices=names, help="one of: "
                        f"{', '.join(names)}; it may be given several times (default: all)")
    parser.add_argument("--sample", metavar="N", type=int, help="take N bugs, from all parts of the zoo")
    parser.add_argument("--again", action="store_true", help="judge also what the results have")
    parser.add_argument("--write", action="store_true", help="judge nothing; write the picture and the page")
    return parser.parse_args()


def todo(options: argparse.Namespace, known: dict, wanted: list) -> list[zoo.Entry]:
    """Return the entries with anything left to judge."""
    entries = [entry for entry in zoo.ENTRIES
               if not options.only or any(part in entry.name for part in options.only)]
    entries = [entry for entry in entries
               if options.again or any(detector.name not in known.get(entry.name, {}) for detector in wanted)]
    return entries[::max(1, len(entries) // options.sample)][:options.sample] if options.sample else entries


def judge(entries: list[zoo.Entry], wanted: list, known: dict, again: bool) -> None:
    """Ask the detectors about each entry, and save the results after each."""
    began = time.monotonic()
    with SmallPools() as pools:
        clean = CleanRuns(pools, CLEAN)
        for i, entry in enumerate(entries):
            bug, verdicts = PlantedBug(entry, pools, clean), known.setdefault(entry.name, {})
            for detector in wanted:
                if again or detector.name not in verdicts:
                    verdicts[detector.name] = detector.judge(bug)
            results.write(known)
            seconds = time.monotonic() - began
            left = seconds / (i + 1) * (len(entries) - i - 1)
            sees = ", ".join(name for name, verdict in verdicts.items() if verdict.mark == SEEN) or "nobody"
            print(f"{i + 1}/{len(entries)} | {seconds:,.0f} s | {left / 60:.0f} min left | {entry.name}: {sees}",
                  flush=True)


if __name__ == "__main__":
    sys.exit(main())
