"""The smallest program of ranks, for `shardlab doctor`: each has its number, counted from 1, and all get the sum."""
import numpy as np

from mpi_impl.comm.group import world
from mpi_impl.launch.entry import run


def main() -> None:
    ranks = world()
    total = ranks.all_reduce(np.array([ranks.rank + 1.0]), "first sum")
    if ranks.rank == 0:
        print(f"{' + '.join(str(i + 1) for i in range(ranks.size))} = {total[0]:g}")


if __name__ == "__main__":
    run(main)
