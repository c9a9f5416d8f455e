"""The launcher of a program on n ranks: `python -m mpi_impl.launch -n 8 -m mpi_impl.pretrain_gpt [its options]`."""
import sys
from functools import partial

from mpi_impl.launch.entry import run_alone
from mpi_impl.launch.guard import run_guarded
from mpi_impl.launch.launcher import main

if __name__ == "__main__":
    sys.exit(run_guarded(partial(run_alone, main)))
