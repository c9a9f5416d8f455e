"""A profile of our training step on CPU cores: matrix products, each kernel, messages, waiting, Python.

    .venv/bin/python benchmarks/where_time_goes.py h512:1 h512:2 --plot where.svg

The step is that of cpu_step.py, on real ranks. contenders/cpu_times.py measures it from outside: nothing in mpi_impl is
slower when nobody measures. Steps with and without the stopwatch take turns, so that its own cost is seen.
"""
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy._core._multiarray_umath
from cpu_step import case_of
from turns import ENVIRONMENT, HERE, launched
from works import WORKS, Work

from mpi_impl.kernels.fused import core
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.rank_environment import cores, thread_settings
from reference.errors import UserError

LEAST = 0.005       # of the step: rows of less are joined into one
SHAPES = 8          # of products that have a row
OPTIONS = "-O2", "-std=c++17", "-shared", "-fPIC"


def main() -> None:
    parser = ArgumentParser(prog="where_time_goes", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", metavar="WORK:RANKS", help=f"as h512:2; works are {', '.join(WORKS)}")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--plot", metavar="FILE", help="draw all cases as bars")
    options = parser.parse_args()
    cases = [case_of(text) for text in options.cases]
    check_outputs(options)
    with tempfile.TemporaryDirectory() as folder:
        clock = compile_clock(Path(folder, "blas_clock.so"))
        found = {text: where(WORKS[name], ranks, clock, options.sequence_parallel)
                 for text, (name, ranks) in zip(options.cases, cases)}
    for (text, times), (name, ranks) in zip(found.items(), cases):
        print(f"\n{text}: {WORKS[name]}, on {ranks} of {cores()} cores\n\n{table(times)}\n\n{products_table(times)}")
    if options.plot:
        from pictures import draw_where
        draw_where({text: by_kind(times) for text, times in found.items()}).savefig(options.plot)


def compile_clock(path: Path) -> Path:
    """Compile the clock around BLAS. Raises UserError where that cannot be loaded before NumPy."""
    if sys.platform != "linux" or not core.works():
        raise UserError("Products are timed by a library that Linux loads before NumPy, and that a C++ compiler makes. "
                        "Install one, as in `apt install g++`.")
    subprocess.run([core.compiler(), *OPTIONS, HERE / "contenders" / "blas_clock.cpp", "-o", path], check=True)
    return path


def where(work: Work, ranks: int, clock: Path, sequence_parallel: bool = False) -> dict:
    """Run the ranks with the clock, and return what they have measured."""
    more = ["--sequence-parallel"] if sequence_parallel else []
    command = launched(ranks, "shardlab_gpt", work.argument, "1", "--where", *more)
    clocked = {"LD_PRELOAD": str(clock), "NUMPY_MODULE": numpy._core._multiarray_umath.__file__}
    done = subprocess.run(command, env={**os.environ, **thread_settings({}), **ENVIRONMENT, **clocked},
                          stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit("error: our contender has died.")
    return json.loads(done.stdout.splitlines()[-1])


def by_kind(times: dict) -> Counter:
    """Return the milliseconds of each kind of work, the longest first."""
    found = Counter[str]()
    for kind, _, ms, _ in times["rows"]:
        found[kind] += ms
    return found


def table(times: dict) -> str:
    """Return a table of the kinds of work, each with its rows, and what the stopwatch costs."""
    whole, plain = times["step"], times["plain"]
    lines = ["| work | ms | of the step | calls |", "|---|---|---|---|"]
    for kind, total in by_kind(times).most_common():
        lines.append(f"| **{kind}** | **{total:.2f}** | **{total / whole:.1%}** | |")
        rows = [row for row in times["rows"] if row[0] == kind and row[1]]
        small = [row[2:] for row in rows if row[2] < LEAST * whole]
        joined = [(kind, f"{len(small)} others", *map(sum, zip(*small)))] if small else []
        for _, name, ms, calls in [row for row in rows if row[2] >= LEAST * whole] + joined:
            lines.append(f"| {name} | {ms:.2f} | {ms / whole:.1%} | {calls:.0f} |" if calls else
                         f"| in {name} | {ms:.2f} | {ms / whole:.1%} | |")
    return "\n".join([*lines, f"| **a step** | **{whole:.2f}** | | |",
                      f"\nWithout the stopwatch a step takes {plain:.2f} ms, {whole / plain - 1:+.1%} with it."])


def products_table(times: dict) -> str:
    """Return a table of the products by shape."""
    lines = ["| product | ms | calls | GFLOP/s |", "|---|---|---|---|"]
    for m, k, n, ms, calls in times["products"][:SHAPES]:
        lines.append(f"| [{m}, {k}] @ [{k}, {n}] | {ms:.2f} | {calls:.0f} | {2e-6 * m * k * n * calls / ms:.0f} |")
    whole = sum(ms for *_, ms, _ in times["products"])
    flops = sum(2 * m * k * n * calls for m, k, n, _, calls in times["products"])
    return "\n".join([*lines, f"| all {len(times['products'])} shapes | {whole:.2f} | | {1e-6 * flops / whole:.0f} |"])


if __name__ == "__main__":
    run_alone(main)
