"""Collectives as functions of a list with one array per rank."""
import numpy as np


def all_reduce(xs, op=np.add):
    """Every rank gets the elementwise sum (or np.maximum) over all ranks: one array per rank, all alike."""
    total = xs[0]
    for x in xs[1:]:
        total = op(total, x)
    return [total for _ in xs]


def all_gather(xs, axis):
    """Every rank gets all the pieces, joined along `axis` in rank order."""
    joined = np.concatenate(xs, axis)
    return [joined for _ in xs]


def reduce_scatter(xs, axis):
    """Rank i gets the i-th piece, along `axis`, of the sum. An all-reduce is this, then an all-gather."""
    return np.split(all_reduce(xs)[0], len(xs), axis)


def broadcast(xs, root=0):
    """Every rank gets what rank `root` holds."""
    return [xs[root] for _ in xs]
