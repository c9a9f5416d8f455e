"""Collectives over a ring of ranks: the elements that each rank sends, the least possible, and their time on a link."""
from dataclasses import dataclass


def ring_all_gather(elements: int, ranks: int) -> float:
    """Return the elements that a rank sends until all ranks have all `elements`, of which each began with its shard.

    In each of n - 1 steps every rank hands the shard that it received last to its neighbour: (n - 1)/n of the elements.
    A reduce-scatter is the same, backwards.
    """
    return elements * (ranks - 1) / ranks


def ring_all_reduce(elements: int, ranks: int) -> float:
    """Return 2 (n - 1)/n of the elements: a reduce-scatter, then an all-gather."""
    return 2 * ring_all_gather(elements, ranks)


# The elements that one rank of a ring sends of a whole array.
RING = {
    "all_reduce": ring_all_reduce,
    "reduce_scatter": ring_all_gather,
    "all_gather": ring_all_gather,
    "all_to_all": ring_all_gather,               # no ring: to every other rank, all but a rank's own
    "broadcast": ring_all_gather,                # the mean over ranks: all but the last one pass it on
    "send": lambda size, ranks: size,            # no ring: to one other rank
    "all_to_all_rows": lambda size, ranks: size,     # likewise, and only what goes to others was counted
}


@dataclass(frozen=True)
class Link:
    """The speed of messages between devices: by default that of 200 Gb/s InfiniBand."""

    latency: float = 5e-6        # seconds
    bandwidth: float = 25e9      # bytes a second

    def seconds(self, operation: str, ranks: int, size: float) -> float:
        """Return the time for `size` bytes in one message, or in a ring collective over `ranks`."""
        turns = {"send": 1, "all_reduce": 2 * (ranks - 1)}.get(operation, ranks - 1)
        return turns * self.latency + RING[operation](size, ranks) / self.bandwidth
