"""The number of elements that a rank sends in a collective over a ring of ranks, which is the least possible."""


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
