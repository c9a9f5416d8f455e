"""The ranks of overlap.py: training steps, with what each rank spends on the messages that it could hide.

Its arguments are the number of turns and a file, in which rank 0 writes what it found, as JSON. Every case takes the
same step in four ways, in turn:

    overlapped   as the machine does it: while a rank computes, it helps on what it has posted
    unhelped     messages are posted as early, but MPI is not called until the rank waits for them
    immediate    each message is waited for where it is posted
    alone        likewise, and all ranks meet before it, so that its time has no waiting for a late rank in it
"""
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from unittest.mock import patch

from models import gpt, random_batch, trainer_of

from mpi_impl.comm import group as group_module
from mpi_impl.comm.group import Group, world
from mpi_impl.comm.pending import Pending
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.launch.entry import run
from mpi_impl.layers import context_attention
from reference.config import ModelConfig, ParallelConfig

WAYS = ("overlapped", "unhelped", "immediate", "alone")
COUNTED = {"post": mean, "help": mean, "wait": min}     # of what the ranks spend in a call; see seconds_by_call
RING = ("keys and values", "gradients of keys and values")
REASONS = {**dict.fromkeys(("buckets", "zero_2", "zero_3"), ("gradients",)),      # of the messages, in the ledger
           "prefetch": ("parameters",), "ring": RING}


class Case(NamedTuple):
    """A training step, and the kind of its messages that is measured: a key of REASONS."""

    kind: str
    model: ModelConfig
    parallel: ParallelConfig
    samples: int        # of a rank


class Spent(NamedTuple):
    """Seconds of a rank in one call."""

    doing: str      # a key of COUNTED
    seconds: float


def cases(ranks: int) -> list[Case]:
    """Return what is swept: the blocks in a bucket, the width of a layer, and the positions of a rank."""
    block = 12 * 256 ** 2
    plain = ParallelConfig(data_parallel_size=ranks)
    return [*(Case(kind, gpt(8, 256, 8, 512, 128), replace(plain, ddp_bucket_size=n * block, zero_stage=stage), 2)
              for kind, stage in (("buckets", 0), ("zero_2", 2)) for n in (1, 2, 4, 8)),
            *(Case(kind, gpt(4, width, 8, 512, 128), replace(plain, zero_stage=3), 2)
              for kind in ("zero_3", "prefetch") for width in (128, 256, 512)),
            *(Case("ring", gpt(2, 256, 8, 512, ranks * each),
                   # gradients are sent when no ring is under way any more
                   ParallelConfig(context_parallel_size=ranks, ddp_bucket_size=4 * block), 1)
              for each in (128, 256, 512, 1024))]


# ---- what a rank spends on messages ---------------------------------------------------------------------------------


class MessageTimer:
    """The seconds that this rank spends on the messages with these reasons, in the order of its calls."""

    def __init__(self, ranks: Group, reasons: Sequence[str], way: str):
        self.ranks, self.reasons, self.way, self.spent = ranks, reasons, way, list[Spent]()
        self.under_way = 0      # messages that are posted, and not yet waited for

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is spent inside of the `with` block."""
        with ExitStack() as patches:
            for owner, name, wrap in ((Group, "_post", self.posting), (context_attention, "pass_on", self.posting),
                                      (Pending, "wait", self.waiting), (Pending, "poll", self.helping),
                                      (group_module, "make_progress", self.helping)):
                patches.enter_context(patch.object(owner, name, wrap(getattr(owner, name))))
            yield

    def timed(self, doing: str, call: Callable) -> Callable:
        """Return a function that makes the call, and counts its time."""
        def timed_call(*arguments):
            began = time.perf_counter()
            result = call(*arguments)
            self.spent.append(Spent(doing, time.perf_counter() - began))
            return result
        return timed_call

    def posting(self, post: Callable) -> Callable:
        """Return a function that posts messages, and waits for them if that is the way."""
        def watched(*arguments):
            if arguments[-1] not in self.reasons:
                return post(*arguments)
            if self.way == "alone":
                self.ranks.comm.Barrier()
            posted = self.timed("post", post)(*arguments)
            messages = posted if isinstance(posted, tuple) else [posted]
            self.under_way += len(messages)
            if self.way in ("immediate", "alone"):
                for pending in messages:
                    pending.wait()
            return posted
        return watched

    def waiting(self, wait: Callable) -> Callable:
        """Return a function that waits for a Pending, and counts the time if it is one of the watched messages."""
        def watched(pending):
            reason = pending.reason.removeprefix("send ").removeprefix("receive ")
            if reason not in self.reasons or not pending.requests:
                return wait(pending)
            self.under_way -= 1
            return self.timed("wait", wait)(pending)
        return watched

    def helping(self, call: Callable) -> Callable:
        """Return a function that makes a call by which MPI makes progress, unless the way is to do without."""
        if self.way == "unhelped":
            return lambda *arguments: False
        return lambda *arguments: (self.timed("help", call) if self.under_way else call)(*arguments)


def seconds_by_call(spent_by_rank: Iterable[Sequence[Spent]]) -> dict[str, float]:
    """Return what a rank spends on messages, by what it does: posting, helping on what is posted, and waiting.

    All ranks make the same calls. A wait counts as long as it is for the rank that comes to it last, since the others
    wait for that rank, too. Of all other calls the mean counts.
    """
    found = dict.fromkeys(COUNTED, 0.0)
    for calls in zip(*spent_by_rank, strict=True):
        doing = calls[0].doing
        found[doing] += COUNTED[doing](call.seconds for call in calls)
    return found


# ---- steps ----------------------------------------------------------------------------------------------------------


class CaseOnRank:
    """A case's trainer on this rank, and its batch."""

    def __init__(self, ranks: Group, case: Case):
        self.ranks, self.case, self.topology = ranks, case, connect(ranks, case.parallel)
        self.trainer = trainer_of(case.model, self.topology)
        s = case.model.max_position_embeddings // case.parallel.context_parallel_size
        self.batch = random_batch(case.model, case.samples, s, ranks.rank)

    def step(self, way: str) -> dict[str, float]:
        """Return the seconds of a step of the slowest rank, and those that a rank spends on messages."""
        watch = MessageTimer(self.ranks, REASONS[self.case.kind], way)
        with watch.watching():
            self.ranks.comm.Barrier()
            began = time.perf_counter()
            self.trainer.step([self.batch], self.case.samples * self.case.parallel.data_parallel_size)
            took = time.perf_counter() - began
        found: Any = self.ranks.allgather_objects((took, watch.spent))
        return {"step": max(seconds for seconds, _ in found), **seconds_by_call([spent for _, spent in found])}

    @property
    def size(self) -> float:
        """Return what the case's sweep varies: MB of the largest bucket, the layers' width, or positions of a rank."""
        if self.case.kind in ("buckets", "zero_2"):
            return round(max(bucket.size for bucket in self.trainer.state.layout.buckets) * 4 / 1e6, 1)
        return self.batch.tokens.shape[1] if self.case.kind == "ring" else self.case.model.hidden_size


def main() -> None:
    turns, ranks = int(sys.argv[1]), world()
    works = [CaseOnRank(ranks, case) for case in cases(ranks.size)]
    found: list[list[dict]] = [[] for _ in works]
    for _ in range(turns + 1):            # the first is for warming up
        for work, times in zip(works, found):
            times.append({way: work.step(way) for way in WAYS})
    if ranks.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps([
            {"kind": work.case.kind, "size": work.size, "turns": times[1:]} for work, times in zip(works, found)]))
    for work in works:
        disconnect(work.topology)


if __name__ == "__main__":
    run(main)
