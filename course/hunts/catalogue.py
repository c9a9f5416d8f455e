"""The catalogue of a course's bugs: `python -m course.hunts.catalogue` tries mutants that only its secret tells.

    python -m course.hunts.catalogue --course runs/course --roster students.txt

It goes on until each level has a case for each student, keeps what their runs leave behind in the course's
`hunts_catalogue.json` (null for a mutant that cannot be hunted), and resumes where it was interrupted. A second mutant
of the same line and kind comes after the first ones of all lines.
"""
import json
import os
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from course.grading.draws import SEED_FILE, read_seed
from course.grading.hunts import read_entries
from course.grading.release import write
from course.hunts.faults import LEVELS, Fault, answer_of, drawn_faults, in_order, probable_level
from course.hunts.trial import Evidence, Trials
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.files import reading
from reference.errors import UserError
from tests.small_pools import SmallPools

FILE = "hunts_catalogue.json"       # in the folder of a course


def main() -> None:
    parser = ArgumentParser(prog="course.hunts.catalogue", description="Try mutants until a course has enough "
                            "cases. It can be interrupted at any time.")
    parser.add_argument("--course", required=True, metavar="FOLDER", type=Path, help="what ./run.sh labs has made")
    parser.add_argument("--roster", metavar="FILE", type=Path, help="a file with a student's name on each line: as "
                        "many cases of each level")
    parser.add_argument("--cases", type=int, metavar="N", help="this many cases of each level")
    parser.add_argument("--most", type=int, default=1 << 30, metavar="N", help="stop after N mutants")
    options = parser.parse_args()
    if not (options.roster or options.cases):
        raise UserError("How many cases? Give the --roster, for a case of each level for each student, or --cases N.")
    cases = options.cases or len(read_roster(options.roster))
    with SmallPools() as pools, TemporaryDirectory() as folder:
        try_drawn(Trials(pools, Path(folder)), options.course, cases, options.most)


def read_roster(path: Path) -> list[str]:
    """Return the lines of a file that are not empty. Raises UserError."""
    with reading(str(path)):
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]


def try_drawn(trials: Trials, course: Path, cases: int, most: int) -> None:
    """Try a course's mutants until each level has this many cases, and write its catalogue after each of them."""
    os.umask(0o077)     # nobody else may read the bugs
    secret, start, tried = read_seed(course / SEED_FILE), time.monotonic(), 0
    known, faults = read(course / FILE), drawn_faults(secret)
    counts = Counter(evidence.level for name, evidence in known.items() if evidence and name in faults)
    for fault in in_turn(in_order(faults.values(), secret, "")):
        if fault.name not in known and tried < most and counts[probable_level(fault)] < cases and trials.runs(fault):
            evidence, tried = trials.of(fault), tried + 1
            known[fault.name] = evidence if evidence and evidence.level else None
            counts.update([evidence.level] if known[fault.name] else [])
            write(course / FILE, (json.dumps(known, indent=1) + "\n").encode())
            print(", ".join(f"{level} {counts[level]} of {cases}" for level in LEVELS) +
                  f" | {tried} mutants tried in {time.monotonic() - start:.0f} seconds", flush=True)


def in_turn(faults: list[Fault]) -> list[Fault]:
    """Return the faults with a second one of the same line and kind after the first of all, and so on."""
    turns, seen = [], Counter[tuple]()
    for fault in faults:
        turns.append(seen[answer_of(fault)])
        seen[answer_of(fault)] += 1
    return [faults[i] for i in sorted(range(len(faults)), key=turns.__getitem__)]


def drawn_cases(course: Path, secret: str) -> dict[Fault, Evidence]:
    """Return the cases of a course's catalogue that are still those of the source."""
    faults = drawn_faults(secret)
    return {faults[key]: evidence for key, evidence in read(course / FILE).items() if evidence and key in faults}


def read(path: Path) -> dict[str, Evidence | None]:
    """Return what the trials of a course's mutants have found, if there were any. Raises UserError."""
    return read_entries(path, lambda case: case and Evidence(*case), "course.hunts.catalogue")


if __name__ == "__main__":
    run_alone(main)
