"""Prove a training run: `mpirun -np 8 python -m shardlab.prove --tensor-model-parallel-size 2 ...`.

It takes pretrain_gpt's options, or pretrain_bert's with --model bert. In place of the run's model it trains a small one
with the same structure for two steps, on numbers modulo a prime, where nothing is rounded: on these ranks, on one rank,
and in the textbook. Then it compares every tensor, by name.

The exit status is 0 if all are the same formulas, and 1 if one is not.
"""
from dataclasses import replace
from functools import partial

from mpi_impl.comm.group import world
from mpi_impl.launch.entry import run
from shardlab.programs.program import run_program
from shardlab.prove.options import parse
from shardlab.prove.proof import Proving


def main(argv: list[str] | None = None) -> None:
    """Run the program on all ranks of the world."""
    settings, ignored = parse(argv, world().size)
    run_program(partial(Proving, settings, ignored), replace(settings.args, trace_clock="wall"))


if __name__ == "__main__":
    run(main)
