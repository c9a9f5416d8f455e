"""The launcher of a program on n ranks: `python -m mpi_impl.launch -n 8 -m mpi_impl.pretrain_gpt [its options]`."""
import sys
from functools import partial

from mpi_impl.launching.entry import run_alone
from mpi_impl.launching.guard import run_guarded
from mpi_impl.launching.launch import main

if __name__ == "__main__":
    sys.exit(run_guarded(partial(run_alone, main)))
