"""The time from a command to the first iteration of a small GPT, and to the end of `--help`.

    .venv/bin/python benchmarks/starting.py
    .venv/bin/python benchmarks/starting.py --before FOLDER     # beside the Shardlab in another folder

The model is so small that its step hardly counts; its corpus is prepared before the first turn. Commands take turns,
each in this folder and then in the other, so that other load on the machine slows both down. The first table has
medians of seconds. The second one tells where the time of rank 0 goes (contenders/starting_rank.py), and the third
which packages take how long to import in a process of its own (`python -X importtime`).
"""
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from programs import head, parse, parser_of, row
from turns import HERE, output_of

from mpi_impl.launch.entry import run_alone
from mpi_impl.runtime.rank_environment import cores, thread_settings
from reference.errors import UserError

MODEL = """--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --vocab-size 1024
           --micro-batch-size 1 --train-iters 1""".split()
RANKS = (1, 2, 8)
LAUNCH, GPT, SHARDLAB = ["-m", "mpi_impl.launch", "-n"], ["-m", "mpi_impl.pretrain_gpt"], ["-m", "mpi_impl.shardlab"]
COMMANDS = {
    **{f"pretrain_gpt on {n} rank{'s' * (n > 1)}": [*LAUNCH, str(n), *GPT, *MODEL] for n in RANKS},
    "shardlab run -n 8 pretrain_gpt": [*SHARDLAB, "run", "-n", "8", "pretrain_gpt", *MODEL],
    "pretrain_gpt --help": [*GPT, "--help"],
    "shardlab run -n 8 pretrain_gpt --help": [*SHARDLAB, "run", "-n", "8", "pretrain_gpt", "--help"],
    "shardlab --help": [*SHARDLAB, "--help"],
}
ITERATION = b"iteration "
IMPORT = re.compile(r"import time: +(\d+) \| +\d+ \| +(\w+)")
OURS = ("mpi_impl", "reference")
PACKAGES = 8            # of the third table, those that take longest

# Python keeps bytecode, as it does for users, even if this shell's variables say that it should not.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def main() -> None:
    parser = parser_of("starting", __doc__)
    parser.add_argument("--before", metavar="FOLDER", help="another folder with Shardlab, to compare with")
    options = parse(parser, turns=(5, "of each command"))
    if options.before is not None and not Path(options.before, "mpi_impl", "launch").is_dir():
        raise UserError(f"--before is {options.before}, where there is no mpi_impl/launch. Name a folder with "
                        "Shardlab.")
    folders = [HERE.parent, *([Path(options.before).absolute()] if options.before else [])]
    print(f"{cores()} cores; seconds, medians of {options.turns} turns each\n")
    print_seconds(folders, options.turns)
    print_phases(options.turns)
    print_packages(options.turns)


def print_seconds(folders: Sequence[Path], turns: int) -> None:
    """Print the seconds of each command, in one folder or two."""
    names = ["command", "now", *(["before", "now / before"] if folders[1:] else [])]
    print(head(*names), flush=True)
    for name, command in COMMANDS.items():
        found: list[list[float]] = [[] for _ in folders]
        for turn in range(1 + turns):       # of which the first prepares the corpus and the bytecode
            for folder, times in zip(folders, found):
                times.extend([seconds(command, folder)][turn == 0:])
        now, *before = map(median, found)
        ratio = [f"**{now / before[0]:.2f}**"] if before else []
        print(row(f"`{name}`", *(f"{one:.2f}" for one in (now, *before)), *ratio), flush=True)


def seconds(command: Sequence[str], folder: Path) -> float:
    """Return the seconds from the start of a command to the line of its first iteration, or to its end without one."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = next((time.perf_counter() for line in process.stdout if line.startswith(ITERATION)), None)
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"error: `python {' '.join(command)}` failed in {folder}.")
    return (found or time.perf_counter()) - began


def print_phases(turns: int) -> None:
    """Print where the time of rank 0 goes, on 1, 2 and 8 ranks."""
    columns = [[phases(n) for _ in range(turns)] for n in RANKS]
    print("\n" + head("seconds of rank 0, of", *RANKS[:-1], f"{RANKS[-1]} ranks"))
    for name in columns[0][0]:
        print(row(name, *(f"{median(one[name] for one in column):.3f}" for column in columns)))


def phases(ranks: int) -> dict[str, float]:
    """Start a job, and return the seconds of each of its phases on rank 0."""
    script = str(HERE / "contenders" / "starting_rank.py")
    began = time.monotonic()
    said = output_of([sys.executable, *LAUNCH, str(ranks), script, str(began), *MODEL])
    lines = [line.split(" ", 2)[1:] for line in said.splitlines() if line.startswith("phase ")]
    return {name: float(time) for time, name in lines}


def print_packages(turns: int) -> None:
    """Print the packages that take longest to import, without those that they import in turn."""
    found = [imports() for _ in range(turns)]
    times = Counter({name: median(one[name] for one in found) for name in found[0]})
    print("\n" + head("package", "ms to import"))
    for name, time_taken in times.most_common(PACKAGES):
        print(row(name, f"{time_taken / 1000:.0f}"))


def imports() -> Counter[str]:
    """Return the microseconds that a rank's modules take, by package; those of the standard library are together."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", "import mpi_impl.programs.pretraining"],
                          cwd=HERE.parent, env=ENVIRONMENT | thread_settings({}), stderr=subprocess.PIPE, text=True)
    found: Counter[str] = Counter()
    for microseconds, package in IMPORT.findall(done.stderr):
        own = package not in sys.stdlib_module_names and package != "_distutils_hack"
        found["Shardlab" if package in OURS else package if own else "the standard library"] += int(microseconds)
    return found


if __name__ == "__main__":
    run_alone(main)
