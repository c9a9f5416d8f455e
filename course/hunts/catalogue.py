"""The catalogue of the mutants that can be hunted: `python -m course.hunts.catalogue` tries those that it lacks.

It holds for each mutant by name the level at which it shows and the run in which it does, or null if it cannot be
hunted. The zoo's bugs need no catalogue: the bug matrix has tried them.
"""
import argparse
import json
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

from course.hunts.faults import CATALOGUE, RUNS, mutations
from course.hunts.trial import Trials
from tests.small_pools import SmallPools


def main() -> None:
    parser = argparse.ArgumentParser(prog="course.hunts.catalogue", description="Try the mutants that the catalogue "
                                     "lacks. It can be interrupted at any time.")
    parser.add_argument("--most", type=int, default=1 << 30, metavar="N", help="stop after N mutants")
    most = parser.parse_args().most
    known = json.loads(CATALOGUE.read_text()) if CATALOGUE.exists() else {}
    faults = {(fault.name, run): fault for run in RUNS for fault in mutations(run)}
    todo = [key for key in faults if key[0] not in known]
    todo = sorted(todo, key=lambda key: zlib.crc32(key[0].encode()))[:most]     # something of each file first
    with SmallPools() as pools, TemporaryDirectory() as folder:
        trials = Trials(pools, Path(folder))
        for name, run in todo:
            if known.get(name):
                continue
            evidence = trials.of(faults[name, run])
            known[name] = [evidence.level, run] if evidence and evidence.level else None
            print(known[name], name, flush=True)
            current = {fault for fault, _ in faults}
            lines = [f"{json.dumps(key)}: {json.dumps(known[key])}" for key in sorted(known) if key in current]
            CATALOGUE.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
