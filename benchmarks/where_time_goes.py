"""A profile of our training step on CPU cores: matrix products, each kernel, messages, waiting, Python.

    .venv/bin/python benchmarks/where_time_goes.py h512:1 h512:2

The step is that of cpu_step.py, on real ranks. contenders/cpu_times.py measures it from outside: nothing in mpi_impl is
slower when nobody measures. Steps with and without the stopwatch take turns, so that its own cost is seen.
"""
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy._core._multiarray_umath
from cpu_step import case_of
from programs import head, parser_of, row
from turns import HERE, launched, output_of
from works import WORKS, Work

from mpi_impl.kernels.fused import core
from mpi_impl.launch.entry import run_alone
from mpi_impl.runtime.rank_environment import cores, thread_settings
from reference.errors import UserError

LEAST = 0.005       # of the step: rows of less are joined into one
SHAPES = 8          # of products that have a row
OPTIONS = "-O2", "-std=c++17", "-shared", "-fPIC"


def main() -> None:
    parser = parser_of("where_time_goes", __doc__)
    parser.add_argument("cases", nargs="+", metavar="WORK:RANKS", help=f"as h512:2; works are {', '.join(WORKS)}")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, in place of float32")
    options = parser.parse_args()
    cases = [case_of(text) for text in options.cases]
    flags = ["--sequence-parallel"] * options.sequence_parallel + ["--bf16"] * options.bf16
    with tempfile.TemporaryDirectory() as folder:
        clock = compile_clock(Path(folder, "blas_clock.so"))
        found = {text: where(WORKS[name], ranks, clock, flags)
                 for text, (name, ranks) in zip(options.cases, cases)}
    for (text, times), (name, ranks) in zip(found.items(), cases):
        print(f"\n{text}: {WORKS[name]}, on {ranks} of {cores()} cores\n\n{table(times)}\n\n{products_table(times)}")


def compile_clock(path: Path) -> Path:
    """Compile the clock around BLAS. Raises UserError where that cannot be loaded before NumPy."""
    if sys.platform != "linux" or not core.works():
        raise UserError("Products are timed by a library that Linux loads before NumPy, and that a C++ compiler makes. "
                        "Install one, as in `apt install g++`.")
    subprocess.run([core.compiler(), *OPTIONS, HERE / "contenders" / "blas_clock.cpp", "-o", path], check=True)
    return path


def where(work: Work, ranks: int, clock: Path, flags: list[str]) -> dict:
    """Run the ranks with the clock, and return what they have measured."""
    command = launched(ranks, "shardlab_gpt", work.argument, "1", "--where", *flags)
    clocked = {"LD_PRELOAD": str(clock), "NUMPY_MODULE": numpy._core._multiarray_umath.__file__}
    return json.loads(output_of(command, **thread_settings({}), **clocked).splitlines()[-1])


def by_kind(times: dict) -> Counter:
    """Return the milliseconds of each kind of work, the longest first."""
    found = Counter[str]()
    for kind, _, ms, _ in times["rows"]:
        found[kind] += ms
    return found


def table(times: dict) -> str:
    """Return a table of the kinds of work, each with its rows, and what the stopwatch costs."""
    whole, plain = times["step"], times["plain"]
    lines = [head("work", "ms", "of the step", "calls")]
    for kind, total in by_kind(times).most_common():
        lines.append(row(f"**{kind}**", f"**{total:.2f}**", f"**{total / whole:.1%}**", ""))
        works = [work for work in times["rows"] if work[0] == kind and work[1]]
        small = [work[2:] for work in works if work[2] < LEAST * whole]
        joined = [(kind, f"{len(small)} others", *map(sum, zip(*small)))] if small else []
        for _, name, ms, calls in [work for work in works if work[2] >= LEAST * whole] + joined:
            lines.append(row(name if calls else f"in {name}", f"{ms:.2f}", f"{ms / whole:.1%}",
                             f"{calls:.0f}" if calls else ""))
    return "\n".join([*lines, row("**a step**", f"**{whole:.2f}**", "", ""),
                      f"\nWithout the stopwatch a step takes {plain:.2f} ms, {whole / plain - 1:+.1%} with it."])


def products_table(times: dict) -> str:
    """Return a table of the products by shape."""
    lines = [head("product", "ms", "calls", "GFLOP/s")]
    for m, k, n, ms, calls in times["products"][:SHAPES]:
        lines.append(row(f"[{m}, {k}] @ [{k}, {n}]", f"{ms:.2f}", f"{calls:.0f}",
                         f"{2e-6 * m * k * n * calls / ms:.0f}"))
    whole = sum(ms for *_, ms, _ in times["products"])
    flops = sum(2 * m * k * n * calls for m, k, n, _, calls in times["products"])
    return "\n".join([*lines, row(f"all {len(times['products'])} shapes", f"{whole:.2f}", "",
                                  f"{1e-6 * flops / whole:.0f}")])


if __name__ == "__main__":
    run_alone(main)
