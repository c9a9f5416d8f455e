"""Five bugs of the zoo, each next to the same run without it: pages for the site, and for a lecture.

    python -m benchmarks.bug_matrix.pairs FOLDER

Both runs of a pair are recorded now, on four ranks; the pages are the same every time.
"""
from dataclasses import replace
from pathlib import Path

from mpi_impl.launch.pool import Pool
from reference.options import OptionParser
from shardlab.compare import two_runs
from shardlab.compare.differences import compare
from shardlab.compare.recording import Recording
from shardlab.compare.report import report
from tests import zoo
from tests.cases import Case, Plan
from tests.planted import buggy_codes
from tests.recorded_runs import MODEL, case, record
from tests.zoo.entry import Entry

RANKS = 4
SMALL = replace(MODEL, num_layers=2)
PAIRS: dict[str, tuple[str, Case, Plan]] = {      # by page: the bug, and where it is planted
    "dropped_all_reduce": ("f without its all-reduce", case(2, model=SMALL), Plan(2)),
    "bias_t_times": ("the MLP's output bias added t times", case(2, model=SMALL), Plan(2)),
    "norms_not_summed": ("the norms' gradients not summed", case(2, True, SMALL), Plan(2)),
    "tied_table_not_summed": ("the tied table's gradients not summed", case(model=SMALL), Plan(2)),
    "wrong_microbatch": ("the targets of the microbatch before", case(model=SMALL), Plan(2)),
}


def page_of(ranks: Pool, entry: Entry, of: Case, plan: Plan) -> str:
    """Record both runs on the ranks of a pool, and return the page. Raises StaleBug if the code has changed."""
    buggy_codes(entry.bug)
    two = two_runs_of(record(ranks, RANKS, of, plan), record(ranks, RANKS, of, plan, bug=entry.bug))
    about = {"story": entry.story, "file": entry.bug.file, "right": entry.bug.right, "wrong": entry.bug.wrong}
    return two_runs.page(two, report(two.found, *two.runs.values()), {"A": "right", "B": entry.name}, about)


def two_runs_of(a: Recording, b: Recording) -> two_runs.TwoRuns:
    return two_runs.TwoRuns(compare(a, b, two_runs.ALL), a, b)


def write_pages(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Pool(RANKS) as ranks:
        for page, (name, of, plan) in PAIRS.items():
            (folder / f"{page}.html").write_text(page_of(ranks, zoo.BY_NAME[name], of, plan))


def main() -> None:
    parser = OptionParser(prog="benchmarks.bug_matrix.pairs", description="Write a page for each of five bugs.")
    parser.add_argument("folder", type=Path, help="where; files of earlier pages are written over")
    folder = parser.parse_args().folder
    try:
        write_pages(folder)
    except OSError as error:
        parser.error(f"{folder} cannot be written: {error.strerror}.")


if __name__ == "__main__":
    main()
