"""Many independent runs, divided among ranks: each rank does one at a time. Their number changes no result."""
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.topology import Topology, connect, disconnect
from reference.config import ParallelConfig

Key = TypeVar("Key", bound=Hashable)
LAST = 0.1      # the share of a run whose mean is its final loss


def do_all(ranks: Group, runs: Sequence[Key], do: Callable[[Key], Any], tell: Callable[[Key, Any], str]
           ) -> dict[Key, Any]:
    """Return `do(run)` of all runs on every rank. As each ends, its rank prints what `tell` says of it."""
    found = {}
    for i, one in enumerate(runs):
        if i % ranks.size == ranks.rank:
            found[one] = do(one)
            print(f"{i + 1:>3} of {len(runs)}: {tell(one, found[one])}", flush=True)
    everyone = {key: result for share in ranks.allgather_objects(found) for key, result in share.items()}
    return {one: everyone[one] for one in runs}


@contextmanager
def each_alone(ranks: Group) -> Iterator[Topology]:
    """Give every rank a topology of its own, in which it can train a model without the others."""
    topology = connect(ranks.split(ranks.rank, "one rank"), ParallelConfig())
    yield topology
    disconnect(topology)


def last_tenth(count: int) -> int:
    """Return how many of so many losses the final loss is the mean of."""
    return max(1, int(LAST * count))


def final(losses: np.ndarray) -> float:
    """Return the mean of the last tenth."""
    return float(losses[-last_tenth(len(losses)):].mean())
