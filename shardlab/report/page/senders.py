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
from mpi_impl.comm.topology import place
from reference.config import ParallelConfig
from reference.parallel.stages import schedule_of
from reference.schedules.actions import Send, lower
from shardlab.predict.group import Colors, members_by_color, survey


class Sent(NamedTuple):
    """The bytes that one rank sends to another in a run, for one reason."""

    source: int
    to: int
    group: str
    phase: str
    reason: str
    bytes: float


def members(rank: int, group: str, colors: Colors) -> Sequence[int]:
    """Return the ranks of a rank's group of this name, in order."""
    if group == "embedding":
        pipeline = members(rank, "pipeline", colors)
        return [pipeline[0], pipeline[-1]]
    if group == "copies":       # some neighbours of the tensor group, how many depends on the model
        group = "tensor"
    if group not in colors:
        return range(len(colors["data"]))       # the world
    return members_by_color(colors[group])[colors[group][rank]]


def sent_by_all(ledgers: Sequence[Ledger], c: ParallelConfig, m: int) -> list[Sent]:
    """Give the bytes of every rank's ledger to pairs of ranks. A step has m microbatches."""
    colors, shares = survey(c), [destinations(c, m, rank) for rank in range(c.pipeline_model_parallel_size)]
    found: dict[tuple[tuple[int, int], tuple[str, str, str]], float] = defaultdict(float)
    for rank, ledger in enumerate(ledgers):
        for entry, total in ledger.totals.items():
            ranks = members(rank, entry.group, colors)
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
