"""Expert parallelism: E experts are dealt out to e ranks, E/e neighbours to each, and tokens travel to their experts.

Each rank has tokens of its own, and sends each copy to the rank of its expert: an *all-to-all*, in which every rank has
a message of another size for every other. What the experts have computed returns the same way. Both are permutations of
the copies of all ranks, so each is the other's inverse, and its backward.

    rank 0 has copies for experts   0 0 1 3            experts 0 and 1 are on rank 0, 2 and 3 on rank 1
    rank 1                          1 2 2
    rank 0 gets                     0 0 1 | 1          sorted by expert: 0 0 1 1
    rank 1                          3 | 2 2                              2 2 3

A list has one element for each rank: its copies, in the order of their experts, or its counts of copies, [E].
"""
import numpy as np

from reference.comm.collectives import all_to_all


def send_to_experts(copies, counts):
    """Send each rank's copies [n, h] to the ranks of their experts; return the copies for each rank's own experts, in
    the order of the experts, and for one expert in the order of the ranks that sent them.
    """
    arrived = all_to_all([np.split(x, ends_of_ranks(own, len(copies))) for x, own in zip(copies, counts)])
    return [np.concatenate(parts)[by_expert(counts_of_rank(counts, rank))] for rank, parts in enumerate(arrived)]


def return_from_experts(copies, counts):
    """Return what was sent, computed [n, h], to the ranks that sent it, in the order in which they sent it."""
    unsorted = []
    for rank, x in enumerate(copies):
        received = counts_of_rank(counts, rank)
        as_arrived = np.empty_like(x)
        as_arrived[by_expert(received)] = x
        unsorted.append(np.split(as_arrived, np.cumsum(received.sum(1))[:-1]))
    return [np.concatenate(parts) for parts in all_to_all(unsorted)]


def ends_of_ranks(counts, e):
    """Return where the copies for one rank's experts end and the next rank's begin, for counts [E]: e - 1 places."""
    return np.cumsum(counts.reshape(e, -1).sum(1))[:-1]


def counts_of_rank(counts, rank):
    """Return how many copies of each of a rank's experts each rank has sent, [e, E/e]."""
    return np.stack([own.reshape(len(counts), -1)[rank] for own in counts])


def by_expert(received):
    """Return the order that sorts by expert what has arrived in the order of senders: received [e, E/e]."""
    experts = np.tile(np.arange(received.shape[1]), len(received))
    return np.argsort(np.repeat(experts, received.reshape(-1)), kind="stable")
