"""Five bugs of the zoo, each next to the same run without it: pages for the site, and for a lecture.

    python -m benchmarks.bug_matrix.pairs FOLDER

Both runs of a pair are recorded now, on four ranks; the pages are the same every time.
"""
import re
import sys
from dataclasses import replace
from pathlib import Path

from mpi_impl.compare import two_runs
from mpi_impl.compare.differences import compare
from mpi_impl.compare.report import report
from mpi_impl.launch.pool import Pool
from tests import zoo
from tests.cases import Case, Plan
from tests.planted import buggy_codes
from tests.recorded_runs import MODEL, case, record
from tests.zoo.entry import Entry

RANKS = 4
SMALL = replace(MODEL, num_layers=2)
PAIRS: dict[str, tuple[Case, Plan]] = {      # the bugs, and where they are planted
    "f without its all-reduce": (case(2, model=SMALL), Plan(2)),
    "the MLP's output bias added t times": (case(2, model=SMALL), Plan(2)),
    "the norms' gradients not summed": (case(2, True, SMALL), Plan(2)),
    "the tied table's gradients not summed": (case(model=SMALL), Plan(2)),
    "the targets of the microbatch before": (case(model=SMALL), Plan(2)),
}


def pair(ranks, entry: Entry, of: Case, plan: Plan) -> two_runs.TwoRuns:
    """Record both runs on the ranks of a pool."""
    buggy_codes(entry.bug)
    a, b = record(ranks, RANKS, of, plan), record(ranks, RANKS, of, plan, bug=entry.bug)
    return two_runs.TwoRuns(compare(a, b, two_runs.ALL), a, b)


def page_of(two: two_runs.TwoRuns, entry: Entry) -> str:
    about = {"What somebody did, and why it looks right": entry.story, f"In {entry.bug.file}, A": entry.bug.right,
             "B": entry.bug.wrong}
    return two_runs.page(two, report(two.found, *two.runs.values()), {"A": "right", "B": entry.name}, about)


def file_of(name: str) -> str:
    """Return the file of a bug's page, which is also the anchor of links to it."""
    return re.sub(r"\W+", "-", name.lower()) + ".html"


def write_pages(folder: Path) -> None:
    """Write the pages. Raises StaleBug if the code of a bug has changed."""
    folder.mkdir(parents=True, exist_ok=True)
    with Pool(RANKS) as ranks:
        for name, setting in PAIRS.items():
            entry = zoo.BY_NAME[name]
            (folder / file_of(name)).write_text(page_of(pair(ranks, entry, *setting), entry))


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
