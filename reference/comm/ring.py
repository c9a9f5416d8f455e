"""How many elements a rank sends in a collective, if the ranks form a ring: the least that is possible."""


def ring_all_gather(elements: int, ranks: int) -> float:
    """Until all have all `elements`, of which each began with its share. A reduce-scatter is the same, backwards.

    In each of n - 1 steps every rank hands the share that it got last to its neighbour: (n - 1)/n of the elements.
    """
    return elements * (ranks - 1) / ranks


def ring_all_reduce(elements: int, ranks: int) -> float:
    """2 (n - 1)/n of the elements: a reduce-scatter, then an all-gather."""
    return 2 * ring_all_gather(elements, ranks)


# What one rank sends of a whole array if the ranks form a ring.
RING = {
    "all_reduce": ring_all_reduce,
    "reduce_scatter": ring_all_gather,
    "all_gather": ring_all_gather,
    "broadcast": ring_all_gather,                # the mean over ranks: all but the last one pass it on
    "send": lambda size, ranks: size,            # no ring: to one other rank
}
