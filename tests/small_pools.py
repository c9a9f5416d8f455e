"""Pools that start quickly, and so again and again."""
from collections.abc import Callable, Sequence

from mpi_impl.launch.pool import Answer, Pool

SIZES = (2, 4, 8)


class SmallPools:
    """A pool of eight ranks in parts: each run gets the smallest pool that has enough ranks."""

    def __init__(self, program: str = "mpi_impl.launch.pool_rank", largest: int | None = None):
        self.pools, self.program = {size: Pool(size, largest=largest) for size in SIZES}, program

    def run(self, n: int, function: Callable, *args, timeout: float = 30.0) -> list:
        return self.of(n).run(n, function, *args, timeout=timeout)

    def answers(self, calls: Sequence[bytes], timeout: float) -> tuple[list[Answer], str]:
        return self.of(len(calls)).answers(calls, timeout)

    def of(self, n: int) -> Pool:
        found = self.pools[next(size for size in SIZES if size >= n)]
        found.program = self.program
        return found

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()

    def __enter__(self) -> "SmallPools":
        return self

    def __exit__(self, *_) -> None:
        self.close()
