"""Score entries of the leaderboard: `shardlab score FILE`, or a folder of them. docs/leaderboard.md has the board.

Scores are counted by simulation and by dry runs: no GPU, no noise. Only the proof of a plan starts ranks.
"""
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.files import check_ending, is_there
from mpi_impl.runtime.tables import aligned
from reference.errors import UserError
from reference.schedules.actions import from_csv
from reference.schedules.simulate import simulate
from shardlab.report.timelines.timelines import slices_of
from shardlab.score import bubble, memory, traffic
from shardlab.score.entry import Entry, read

TASKS: dict[str, ModuleType] = {"bubble": bubble, "bytes": traffic, "memory": memory}
ENTRIES = Path(__file__).parent / "entries"         # the board's, each with its score


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="shardlab.score", description=__doc__)
    parser.add_argument("path", nargs="*", help="an entry, or a folder of entries, to score and rank with the board's")
    parser.add_argument("--plot", metavar="F", help="draw the schedules of the board and of the entries in this file")
    parser.add_argument("--tasks", action="store_true", help="print the tasks, their rules and the board")
    options = parser.parse_args(argv)
    if options.plot:
        check_ending(options.plot)
    if options.tasks or not options.path:
        print("\n".join(f"{task.__doc__}" for task in TASKS.values()))
    ranked, refused = on_board(), []
    for path in files(options.path):
        try:
            ranked.append((path, scored(path)))
        except UserError as error:
            refused.append(f"{error}" if path in str(error) else f"{path}: {error}")
    print(board(ranked))
    if options.plot:
        draw(options.plot, ranked)
    if refused:
        raise UserError("\n".join(refused))


def files(paths: Sequence[str]) -> Iterable[str]:
    """Yield the files, and the entries of folders. Raises UserError for a path that is not there."""
    for path in paths:
        if not is_there(path):
            raise UserError(f"There is no {path}. Name an entry, or a folder of entries, which end in .toml.")
        yield from map(str, sorted(Path(path).glob("*.toml"))) if os.path.isdir(path) else [path]


def scored(path: str) -> Entry:
    """Read an entry and score it. Raises UserError if it is not valid, or states another score."""
    entry = read(path)
    if entry.task not in TASKS:
        raise UserError(f"There is no task {entry.task!r}. The tasks are {', '.join(TASKS)}.")
    score = TASKS[entry.task].score(entry)
    if entry.score not in (None, score):
        raise UserError(f"The file says that its score is {entry.score:,}, but it is {score:,}. Leave it out, or "
                        "correct it.")
    entry.score = score
    return entry


def on_board() -> list[tuple[str, Entry]]:
    """Return the names and entries of the board, which have been scored before."""
    return [(path.stem, read(str(path))) for path in sorted(ENTRIES.glob("*.toml"))]


def board(entries: Sequence[tuple[str, Entry]]) -> str:
    """Return a table for each task: the entries by score, equal ones in the same place."""
    tables = []
    for name, task in TASKS.items():
        own = sorted(((entry.score or 0, entry.author, path) for path, entry in entries if entry.task == name))
        rows = [[str(1 + sum(other < score for other, *_ in own)), f"{score:,}", f"+{score / task.LEAST - 1:.1%}",
                 author, path] for score, author, path in own]
        tables.append(aligned([["", task.UNIT, "above the bound", "author", "entry"], *rows], left=(3, 4)))
        tables[-1] = f"{name}: nothing is below {task.LEAST:,} {task.UNIT}\n\n{tables[-1]}\n"
    return "\n".join(tables)


def draw(path: str, entries: Sequence[tuple[str, Entry]]) -> None:
    """Draw the schedules with one time axis, the best first."""
    from shardlab.report.timelines.gantt import Panel, draw_timelines  # matplotlib takes a second to import

    own = sorted((entry.score or 0, name, entry.schedule) for name, entry in entries if entry.task == "bubble")
    draw_timelines(path, [Panel(name, slices_of(simulate(from_csv(schedule), bubble.TIMES)))
                          for _, name, schedule in own], seconds=False)


if __name__ == "__main__":
    run_alone(main)
