"""Expert parallelism on one rank: copies of tokens travel to the ranks of their experts, and back.

The textbook twin is reference/comm/expert_parallel.py, over a list with one array per rank.
"""
import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.runtime.arrays import moved_to, to_host
from reference.comm.expert_parallel import by_expert, counts_of_rank


def send_to_experts(copies, counts, group: Group, reason: str):
    """Send copies [n, h] to the ranks of their experts; return those for this rank's experts, in the order of the
    experts, and for one expert in the order of the ranks that sent them. `counts` are all ranks', [e, E].
    """
    sent = rows_between_ranks(counts)
    arrived = group.all_to_all_rows(copies, sent[group.rank].tolist(), sent[:, group.rank].tolist(), reason)
    return arrived[moved_to(by_expert(counts_of_rank(counts, group.rank)), copies)]


def return_from_experts(copies, counts, group: Group, reason: str):
    """Return what was sent, computed [n, h], to the ranks that sent it, in the order in which they sent it."""
    sent = rows_between_ranks(counts)
    as_arrived = np.empty_like(copies)
    as_arrived[moved_to(by_expert(counts_of_rank(counts, group.rank)), copies)] = copies
    return group.all_to_all_rows(as_arrived, sent[:, group.rank].tolist(), sent[group.rank].tolist(), reason)


def counts_of_ranks(counts, group: Group):
    """Return the counts of copies [E] of all ranks, [e, E], on the host: they say how long the messages are."""
    return group.all_gather(to_host(counts)[None], 0, "experts: counts of copies")


def rows_between_ranks(counts):
    """Return how many copies each rank sends to each, [from, to], from all ranks' counts [e, E]."""
    return counts.reshape(len(counts), len(counts), -1).sum(-1)
