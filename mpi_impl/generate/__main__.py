"""Texts from a trained GPT: `mpirun -np 4 python -m mpi_impl.generate --load DIR --tensor-model-parallel-size 2
--pipeline-model-parallel-size 2 --prompt "..."`. The number of ranks need not be that of training, and does not change
the text.
"""
from functools import partial

from mpi_impl.comm.group import world
from mpi_impl.generate.generation import Generation
from mpi_impl.generate.options import parse
from mpi_impl.launch.entry import run
from mpi_impl.programs.program import run_program


def main(argv: list[str] | None = None) -> None:
    settings = parse(argv, world().size)
    run_program(partial(Generation, settings), settings.args)


if __name__ == "__main__":
    run(main)
