"""Data parallelism on ranks: gradients that are summed over the replicas, bucket by bucket.

Every replica has already divided its losses by the size of the *global* batch, so gradients are added up, not averaged,
and it makes no difference how the samples are spread over replicas and microbatches. The textbook twin is
reference/parallel/data_parallel.py, which deals out the samples too.
"""
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, Pending
from mpi_impl.models.units import Unit
from mpi_impl.parallel.buffers import Buffer, Whole
from reference.parallel.layout import Bucket, Layout, map_units
from reference.params import leaves


def group_of(holder, bucket: Bucket) -> Group:
    """Return the ranks that hold copies of a bucket, for the holder of a rank's gradients or parameters."""
    return holder.expert_group if bucket.dealt else holder.group


def reason_of(bucket: Bucket) -> str:
    """Return why a bucket's gradients are sent, for the ledger."""
    return "gradients of experts" if bucket.dealt else "gradients"


class Reduction(NamedTuple):
    """A bucket's sum over the replicas that has begun."""

    bucket: Bucket
    flat: Any           # its elements, which are there until the sum is
    pending: Pending
    last: bool          # in this step


class Gradients:
    """A rank's flat gradients. Each bucket's sum over the replicas begins as soon as the bucket is complete.

    The buffer lies in backward order, so the bucket of the last layers is complete, and its sum begins, while the last
    microbatch's backward still works on the first layers. A bucket is complete when it has got all its contributions:
    they are counted, so this class need not know the schedule.
    """

    whole_after_backward = True     # until the sums begin, a rank has the gradients of all its parameters

    def __init__(self, layout: Layout, group: Group, contributions: Mapping[str, int], like,
                 expert_group: Group | None = None, instances: Group | None = None):
        """Allocate the buffer, of the kind of `like`. `contributions` says for some units how many a microbatch makes;
        to the others it makes one. `group` has the replicas, `expert_group` those of them that hold the same experts.
        With hybrid sharding `group` has those of an instance, and `instances` the ranks with the same shard.
        """
        self.layout, self.group, self.expert_group, self.like = layout, group, expert_group, like
        self.instances = instances
        self.expected = {bucket: sum(contributions.get(unit, 1) for unit in bucket.units) for bucket in layout.buckets}
        self.missing: dict[Bucket, int] = {}        # contributions of the whole step
        self.begun = deque[Reduction]()             # in this order, the same on all replicas
        self.between_instances: list[Pending] = []
        self.whole_bytes = 0            # the most bytes of buckets that were materialized at the same time
        self.allocate()

    def allocate(self) -> None:
        """Make the buffer that lasts from step to step."""
        self.own: Buffer = Whole(np.zeros_like(self.like, shape=self.layout.size))

    def units(self, tensors):
        """Return a model's tree with units in it, to which a backward adds gradients."""
        return map_units(lambda name, below: Unit(name, self.layout.views_of(below, self.own.flat, name)), tensors)

    def expect(self, microbatches: int) -> None:
        """Begin a step."""
        self.own.flat[...] = 0
        self.missing = {bucket: microbatches * expected for bucket, expected in self.expected.items()}
        self.between_instances = []

    def contributed(self, *units) -> None:
        """Count a contribution to each unit in these trees: a microbatch's backward has finished one use of them."""
        for tree in units:
            for _, unit in leaves(tree):
                for bucket in self.layout.buckets_of(unit.name):
                    self.missing[bucket] -= 1
                    self.counted(bucket)
        for pending in (*(reduction.pending for reduction in self.begun), *self.between_instances):
            pending.poll()

    def counted(self, bucket: Bucket) -> None:
        """Begin the bucket's sum if this contribution was the last."""
        if self.missing[bucket] == 0:
            self.begin(bucket)

    def begin(self, bucket: Bucket) -> None:
        """Begin a bucket's sum."""
        flat = self.complete(bucket)
        with self.group.ledger.phase("reduction"):
            self.begun.append(Reduction(bucket, flat, self.post(bucket, flat), self.missing[bucket] == 0))

    def complete(self, bucket: Bucket):
        """Return the elements of a bucket that is complete."""
        return self.own.flat[bucket.slice]

    def post(self, bucket: Bucket, flat) -> Pending:
        """Post the call that sums a bucket, flat [size]."""
        return group_of(self, bucket).post_all_reduce(flat, reason_of(bucket))

    def finish(self) -> None:
        """Wait until all sums are there."""
        assert not any(self.missing.values()), f"contributions are missing: {self.missing}"
        self.finish_first(len(self.begun))
        for pending in self.between_instances:
            pending.wait()

    def finish_first(self, n: int) -> None:
        """Wait for the n sums that began first. With hybrid sharding, begin to sum this rank's part of them over the
        ranks that own the same in other instances, once a step.
        """
        for _ in range(n):
            bucket, _, pending, last = self.begun.popleft()
            self.keep(bucket, pending.wait())
            if self.instances and last:
                own = self.own.load(self.layout.owned_piece(bucket, self.group.rank))
                with self.group.ledger.phase("reduction"):
                    self.between_instances.append(self.instances.post_all_reduce(own, reason_of(bucket)))

    def keep(self, bucket: Bucket, total) -> None:
        """Do nothing: the sum is in its place."""
