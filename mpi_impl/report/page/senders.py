"""The traffic of each pair of ranks: who sends how much to whom, and why.

A ledger counts calls of a group, not pairs. A collective counts here as a ring, in the order of the group's ranks: each
rank sends its ring-equivalent bytes to the next one, and the last to the first; so do the keys and values of context
parallelism. In an all-to-all each rank sends the same to every other. A message between stages goes where the schedule
says. So the sum over all pairs is the sum over all ledgers.
"""
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mpi_impl.comm.ledger import Ledger, ring_bytes
from mpi_impl.comm.topology import Place, place, rank_at
from reference.config import ParallelConfig
from reference.parallel.stages import schedule_of
from reference.schedules.actions import Send, lower


class Sent(NamedTuple):
    """The bytes that one rank sends to another in a run, for one reason."""

    source: int
    to: int
    group: str
    phase: str
    reason: str
    bytes: float


def in_replica(at: Place, replica: int, c: ParallelConfig) -> int:
    """Return the rank at the same place in another copy of the dense parameters."""
    data, context = divmod(replica, c.context_parallel_size)
    return rank_at(at._replace(context=context, data=data), c)


def members(rank: int, group: str, c: ParallelConfig) -> list[int]:
    """Return the ranks of a rank's group of this name, in order."""
    at, p, e = place(rank, c), c.pipeline_model_parallel_size, c.expert_model_parallel_size
    replica = at.context + c.context_parallel_size * at.data
    match group:
        case "tensor":
            return [rank_at(at._replace(tensor=i), c) for i in range(c.tensor_model_parallel_size)]
        case "context":
            return [rank_at(at._replace(context=i), c) for i in range(c.context_parallel_size)]
        case "data":
            return [rank_at(at._replace(data=i), c) for i in range(c.data_parallel_size)]
        case "replicas":
            return [in_replica(at, i, c) for i in range(c.replicas)]
        case "shards":
            n = c.instance_size
            return [in_replica(at, i, c) for i in range(replica // n * n, replica // n * n + n)]
        case "instances":
            return [in_replica(at, i, c) for i in range(replica % c.instance_size, c.replicas, c.instance_size)]
        case "expert":
            return [in_replica(at, i, c) for i in range(replica // e * e, replica // e * e + e)]
        case "expert replicas":
            return [in_replica(at, i, c) for i in range(replica % e, c.replicas, e)]
        case "holders":
            return [other for other in range(c.world_size) if (rest := place(other, c)).context
                    + c.context_parallel_size * rest.data in range(replica // e * e, replica // e * e + e)]
        case "copies":      # some neighbours of these, how many depends on the model
            return members(rank, "tensor", c)
        case "pipeline":
            return [rank_at(at._replace(pipeline=i), c) for i in range(p)]
        case "embedding":
            return [rank_at(at._replace(pipeline=i), c) for i in (0, p - 1)]
        case "model":
            return [other for other in range(c.world_size) if place(other, c).replica == at.replica]
    return list(range(c.world_size))


def sent_by_all(ledgers: Sequence[Ledger], c: ParallelConfig, m: int) -> list[Sent]:
    """Give the bytes of every rank's ledger to pairs of ranks. A step has m microbatches."""
    shares = [destinations(c, m, rank) for rank in range(c.pipeline_model_parallel_size)]
    found: dict[tuple[tuple[int, int], tuple[str, str, str]], float] = defaultdict(float)
    for rank, ledger in enumerate(ledgers):
        for entry, total in ledger.totals.items():
            ranks = members(rank, entry.group, c)
            following = ranks[(ranks.index(rank) + 1) % len(ranks)]
            if entry.operation.startswith("all_to_all"):
                to = {other: 1 / (len(ranks) - 1) for other in ranks if other != rank}
            elif entry.operation == "send" and entry.group != "context":
                known = shares[place(rank, c).pipeline].get(entry.reason, {0: 1.0})     # weights to save go to rank 0
                to = {ranks[i]: share for i, share in known.items()}
            else:
                to = {following: 1.0}
            if size := ring_bytes(entry, total):
                for other, share in to.items():
                    found[(rank, other), (entry.group, entry.phase, entry.reason)] += share * size
    return [Sent(*pair, *why, size) for (pair, why), size in found.items()]


def destinations(c: ParallelConfig, m: int, rank: int) -> dict[str, dict[int, float]]:
    """Return which share of a pipeline rank's activations and gradients goes to which rank. All have one size."""
    found = {"activation": Counter[int](), "gradient": Counter[int]()}
    for step in lower(schedule_of(c, m))[rank]:
        if isinstance(step, Send):
            found["activation" if step.action.kind == "F" else "gradient"][step.to] += 1
    return {reason: {to: count / counts.total() for to, count in counts.items()} for reason, counts in found.items()}
