"""Mutation testing: plant small mistakes, one at a time, and see whether the tests notice.

    python -m tools.mutants --sample 50 --seed 1            # fifty mutants of all folders, one after the other
    python -m tools.mutants mpi_impl/layers                 # all mutants of a folder or file
    python -m tools.mutants --survivors                     # again those that survived: do new tests kill them?
    python -m tools.mutants --list reference/ops.py         # show the mutants, run nothing

Results are kept in build/mutants: the same command goes on where it was interrupted. A file that has changed begins
anew. `equivalent.txt` lists the mutants that compute the same as the program, each with the reason.
"""
import argparse
import random
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from mpi_impl.launch.entry import run_alone
from tools.mutants.operators import ROOT, Mutant, mutants
from tools.mutants.worker import FOUND, checksum, results, write

FOLDERS = ["reference", *(f"mpi_impl/{name}" for name in
                          ("comm", "layers", "models", "parallel", "training", "checkpoints"))]
TESTS = ["tests/reference", "tests/mpi_impl", "tests/checkpoints", "tests/generate",
         "tests/evaluate/test_argmax_token.py", "tests/test_refusals.py", "tests/test_spy_layers.py",
         "tests/gpu/test_ranks.py"]
# Tests that start programs, in which no mutant is planted, or that repeat others.
LEFT_OUT = """mpi_impl/test_demos mpi_impl/test_pretrain mpi_impl/test_kills mpi_impl/test_faults
    mpi_impl/test_report_page mpi_impl/test_sample mpi_impl/test_experiments mpi_impl/test_timelines
    mpi_impl/test_arguments mpi_impl/test_report mpi_impl/test_files
    mpi_impl/test_resident_memory generate/test_generate generate/test_stream
    generate/test_saved_tokenizer checkpoints/test_resumed_runs
    checkpoints/test_program""".split()
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
WORKED = pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED     # as pytest says where a plugin has run the tests
OTHER = ("survived", "not run", "equivalent", "not planted")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    chosen = choose(options.paths, options.sample, options.seed)
    if not chosen:
        sys.exit(f"error: there is nothing to mutate in {' '.join(options.paths)}: name folders or Python files, as "
                 "mpi_impl/layers, from the root of the repository.")
    if options.list:
        for mutant in chosen:
            print(f"{mutant.path}:{mutant.line}  {mutant.operator}\n    {mutant.before}\n    {mutant.after}")
        return 0
    known = latest(options.folder, chosen)
    todo = [mutant for mutant in chosen if mutant.name not in equivalents() and
            (known.get(mutant.name) is None or options.survivors and known[mutant.name]["result"] not in FOUND)]
    if options.survivors:
        todo = [mutant for mutant in todo if mutant.name in known]
    work(todo, options.folder, options.tests or default_tests(), options.minutes, options.budget)
    print(report(chosen, latest(options.folder, chosen)))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=FOLDERS, help="folders or files (all that are listed)")
    parser.add_argument("--sample", type=int, help="as many mutants, chosen at random (all)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after this time")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests for each mutant (30)")
    parser.add_argument("--survivors", action="store_true", help="try again those that no test has killed")
    parser.add_argument("--tests", nargs="*", help="test files (those of the folders)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants", help="where the results are")
    parser.add_argument("--list", action="store_true", help="show the mutants only")
    return parser.parse_args(argv)


def choose(paths: list[str], sample: int | None, seed: int) -> list[Mutant]:
    """Return the mutants of these files and folders, or so many of them, in an order that the seed gives."""
    files = sorted({str(file.relative_to(ROOT)) for path in paths
                    for file in ([ROOT / path] if (ROOT / path).is_file() else (ROOT / path).rglob("*.py"))})
    found = [mutant for file in files for mutant in mutants(file)]
    if sample is None:
        return found
    return random.Random(seed).sample(found, min(sample, len(found)))


def default_tests() -> list[str]:
    files = [file for path in TESTS for file in
             ([ROOT / path] if (ROOT / path).is_file() else (ROOT / path).rglob("test_*.py"))]
    names = sorted(str(file.relative_to(ROOT)) for file in files)
    return [name for name in names if name.removeprefix("tests/").removesuffix(".py") not in LEFT_OUT]


def equivalents() -> dict[str, str]:
    """Return the mutants that compute the same, by name, with the reason: every second line of the file."""
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return {name: reason.strip() for name, reason in zip(lines[::2], lines[1::2], strict=True)}


def latest(folder: Path, chosen: list[Mutant]) -> dict[str, dict]:
    """Return the last result of each of these mutants whose file has not changed since."""
    sums = {path: checksum(path) for path in {mutant.path for mutant in chosen}}
    wanted, found = {mutant.name for mutant in chosen}, {}
    for result in results(folder):
        if result["name"] in wanted and result["sum"] == sums[result["path"]]:
            found[result["name"]] = result
    return found


def work(todo: list[Mutant], folder: Path, tests: list[str], minutes: float, budget: float) -> None:
    """Try all mutants, in a pytest session."""
    write(folder / "queue.json", todo)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", "-p", "tools.mutants.worker", "-p",
               "no:cacheprovider", "--rootdir", ROOT, "-c", ROOT / "pyproject.toml", "--mutants", folder,
               "--budget", str(budget), "--minutes", str(minutes), *tests]
    if todo and subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode not in WORKED:
        sys.exit("error: the tests did not start: see above.")


def report(chosen: list[Mutant], known: dict[str, dict]) -> str:
    """Return a table of the folders' scores, and the list of the mutants that no test has killed."""
    rows: dict[str, Counter] = defaultdict(Counter)
    alive = []
    for mutant in chosen:
        result = "equivalent" if mutant.name in equivalents() else known.get(mutant.name, {}).get("result")
        if result:
            rows[str(Path(mutant.path).parent)][result] += 1
            rows["all"][result] += 1
        if result in ("survived", "not run", "not planted"):
            alive.append(f"{mutant.path}:{mutant.line}  {result}, {mutant.operator}\n"
                         f"    {mutant.before}\n    {mutant.after}")
    lines = [f"{'folder':28}" + "".join(f"{name:>12}" for name in (*FOUND, *OTHER, "score"))]
    for name in [*sorted(rows.keys() - {"all"}), *rows.keys() & {"all"}]:
        counts = rows[name]
        killed = sum(counts[kind] for kind in FOUND)
        tried = killed + counts["survived"] + counts["not run"]
        score = f"{100 * killed / tried:.1f} %" if tried else "-"
        lines.append(f"{name:28}" + "".join(f"{counts[kind]:12}" for kind in (*FOUND, *OTHER)) + f"{score:>12}")
    return "\n".join([*lines, "", *alive])


if __name__ == "__main__":
    run_alone(lambda: sys.exit(main()))
