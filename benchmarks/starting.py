"""The time from a command to the first iteration of a small GPT, and to the end of `--help`.

    .venv/bin/python benchmarks/starting.py

The model is so small that its step hardly counts; its corpus is prepared before the first turn. The table has medians
of seconds.
"""
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

from programs import head, parse, parser_of, row
from turns import HERE

from mpi_impl.launch.entry import run_alone
from mpi_impl.runtime.rank_environment import cores

MODEL = """--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --vocab-size 1024
           --micro-batch-size 1 --train-iters 1""".split()
RANKS = (1, 2, 8)
LAUNCH, GPT, SHARDLAB = ["-m", "mpi_impl.launch", "-n"], ["-m", "mpi_impl.pretrain_gpt"], ["-m", "shardlab"]
COMMANDS = {
    **{f"pretrain_gpt on {n} rank{'s' * (n > 1)}": [*LAUNCH, str(n), *GPT, *MODEL] for n in RANKS},
    "shardlab run -n 8 pretrain_gpt": [*SHARDLAB, "run", "-n", "8", "pretrain_gpt", *MODEL],
    "pretrain_gpt --help": [*GPT, "--help"],
    "shardlab run -n 8 pretrain_gpt --help": [*SHARDLAB, "run", "-n", "8", "pretrain_gpt", "--help"],
    "shardlab --help": [*SHARDLAB, "--help"],
}
ITERATION = b"iteration "
# Python keeps bytecode, as it does for users, even if this shell's variables say that it should not.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def main() -> None:
    options = parse(parser_of("starting", __doc__), turns=(5, "of each command"))
    print(f"{cores()} cores; medians of {options.turns} turns each\n\n{head('command', 'seconds')}", flush=True)
    for name, command in COMMANDS.items():
        seconds(command)        # which prepares the corpus and the bytecode
        print(row(f"`{name}`", f"{median(seconds(command) for _ in range(options.turns)):.2f}"), flush=True)


def seconds(command: Sequence[str]) -> float:
    """Return the seconds from the start of a command to the line of its first iteration, or to its end without one."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], cwd=HERE.parent, env=ENVIRONMENT,
                          stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = next((time.perf_counter() for line in process.stdout if line.startswith(ITERATION)), None)
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"error: `python {' '.join(command)}` failed.")
    return (found or time.perf_counter()) - began


if __name__ == "__main__":
    run_alone(main)
