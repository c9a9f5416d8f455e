"""Collectives as functions of a list with one array per rank."""
import numpy as np


def all_reduce(xs, op=np.add):
    """Return the elementwise sum (or np.maximum) over all ranks, identical on every rank."""
    total = xs[0]
    for x in xs[1:]:
        total = op(total, x)
    return [total for _ in xs]


def all_gather(xs, axis):
    """Return all shards, joined along `axis` in rank order, on every rank."""
    joined = np.concatenate(xs, axis)
    return [joined for _ in xs]


def reduce_scatter(xs, axis):
    """Return the i-th shard of the sum, along `axis`, on rank i. An all-reduce is this, then an all-gather."""
    return np.split(all_reduce(xs)[0], len(xs), axis)


def broadcast(xs, root=0):
    """Return rank `root`'s array on every rank."""
    return [xs[root] for _ in xs]


def all_to_all(xs):
    """Return on rank i what each rank has for it, in rank order: xs[j][i] comes from rank j. Any sizes will do."""
    return [list(parts) for parts in zip(*xs)]


# ---- to one rank, or from it: every byte passes through the root, so nothing in this project uses them ---------------


def reduce(xs, root=0):
    """Return the sum over all ranks on rank `root`, None on the others."""
    return [all_reduce(xs)[0] if rank == root else None for rank in range(len(xs))]


def gather(xs, axis, root=0):
    """Return all shards, joined along `axis` in rank order, on rank `root`, None on the others."""
    return [np.concatenate(xs, axis) if rank == root else None for rank in range(len(xs))]


def scatter(xs, axis, root=0):
    """Return the i-th shard of rank `root`'s array along `axis` on rank i."""
    return np.split(xs[root], len(xs), axis)
