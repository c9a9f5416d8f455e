"""Data parallelism on ranks. Its textbook twin, reference/parallel/data_parallel.py, deals out samples too.

Every replica has divided its losses by the size of the *global* batch already, so gradients are added up, not averaged,
and how the samples are spread over replicas and microbatches changes nothing.
"""
from collections.abc import Mapping

import numpy as np

from mpi_impl.comm.group import Group, Pending
from mpi_impl.models.units import Unit
from mpi_impl.parallel.buffers import Buffer, Whole
from reference.parallel.layout import Bucket, Layout, map_units
from reference.params import leaves


class Gradients:
    """A rank's flat gradients, and their sum over the replicas, in buckets, each begun as soon as it is complete.

    The buffer lies in backward order, so the last layers' bucket is complete, and on its way, while the last
    microbatch's backward still works on the first layers. Complete is what has got all its contributions: they are
    counted, and no schedule needs to be known.
    """

    def __init__(self, layout: Layout, group: Group, contributions: Mapping[str, int], like):
        """`contributions`: by unit, how many a microbatch makes, if not one. The buffer is of the kind of `like`."""
        self.layout, self.group, self.like = layout, group, like
        self.expected = {bucket: sum(contributions.get(unit, 1) for unit in bucket.units) for bucket in layout.buckets}
        self.missing: dict[Bucket, int] = {}        # contributions of the whole step
        self.begun: list[Pending] = []
        self.whole_bytes = 0            # of buckets that are there for a while
        self.allocate()

    def allocate(self) -> None:
        self.own: Buffer = Whole(np.zeros_like(self.like, shape=self.layout.size))

    def units(self, tensors):
        """A model's tree, with a unit in the place of each of its units, to add gradients to."""
        return map_units(lambda name, below: Unit(name, self.layout.views_of(below, self.own.flat, name)), tensors)

    def expect(self, microbatches: int) -> None:
        """A step begins."""
        self.own.flat[...] = 0
        self.missing = {bucket: microbatches * expected for bucket, expected in self.expected.items()}
        self.begun = []

    def contributed(self, *units) -> None:
        """One microbatch has given these units, trees of them, all that it gives them at this place."""
        for tree in units:
            for _, unit in leaves(tree):
                bucket = self.layout.bucket_of[unit.name]
                self.missing[bucket] -= 1
                self.counted(bucket)
        for pending in self.begun:
            pending.poll()

    def counted(self, bucket: Bucket) -> None:
        """A contribution is in; if it is the last, the bucket's sum begins."""
        if self.missing[bucket] == 0:
            with self.group.ledger.phase("reduction"):
                self.begun.append(self.begin(bucket))

    def begin(self, bucket: Bucket) -> Pending:
        return self.group.post_all_reduce(self.own.flat[bucket.slice], "gradients")

    def finish(self) -> None:
        """All gradients are complete: wait until all have been added up."""
        assert not any(self.missing.values()), f"contributions are missing: {self.missing}"
        for pending in self.begun:
            pending.wait()
