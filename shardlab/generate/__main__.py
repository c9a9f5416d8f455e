"""Texts from a trained GPT: `mpirun -np 4 python -m shardlab.generate --load DIR --tensor-model-parallel-size 2
--pipeline-model-parallel-size 2 --prompt "..."`. The number of ranks need not be that of training, and does not change
the text.
"""
from functools import partial

from mpi_impl.comm.group import world
from mpi_impl.launch.entry import run
from shardlab.generate.generation import Generation
from shardlab.generate.options import parse
from shardlab.programs.program import run_program


def main(argv: list[str] | None = None) -> None:
    settings = parse(argv, world().size)
    run_program(partial(Generation, settings), settings.args)


if __name__ == "__main__":
    run(main)
