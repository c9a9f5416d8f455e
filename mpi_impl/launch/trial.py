"""The program by which `shardlab doctor` tries what MPI can do: its status is 0 if that worked, and 3 if not."""
import sys

import numpy as np

from mpi_impl.comm.abilities import TRIALS
from mpi_impl.comm.group import world
from mpi_impl.launch.entry import run

LACKING = 3


def main() -> None:
    ranks = world()
    failed = np.array([float(not TRIALS[sys.argv[1]](ranks))])
    if ranks.all_reduce(failed, "whether it failed", op="max")[0]:
        sys.exit(LACKING)


if __name__ == "__main__":
    run(main)
