"""Data parallelism on ranks. Its textbook twin is reference/data_parallel.py, which deals out the samples, too.

Every replica has divided its losses by the size of the *global* batch already, so gradients are added up, not averaged,
and how the samples are spread over replicas and microbatches changes nothing.
"""
from collections.abc import Mapping

from mpi_impl.comm.group import Group, Pending
from reference.params import Layout, leaves


class GradientReduction:
    """The sum over replicas of their flat gradients, in buckets, each begun as soon as it is complete.

    The buffer lies in backward order, so the last layers' bucket is complete, and on its way, while the last
    microbatch's backward still works on the first layers. Complete is what has got all its contributions: they are
    counted, and no schedule needs to be known.
    """

    def __init__(self, flat, grads, layout: Layout, group: Group, bucket_size: int,
                 contributions: Mapping[str, int]):
        """`grads` is the tree of views of `flat`. `contributions`: by name, how many a microbatch makes, if not one."""
        self.flat, self.group = flat, group
        self.buckets = layout.buckets(bucket_size)
        home = {name: i for i, bucket in enumerate(self.buckets) for name in bucket.names}
        self.bucket_of = {id(view): home[name] for name, view in leaves(grads)}     # arrays cannot be keys themselves
        self.expected = [sum(contributions.get(name, 1) for name in bucket.names) for bucket in self.buckets]
        self.missing: list[int] = []         # contributions, by bucket
        self.begun: list[Pending] = []

    def expect(self, microbatches: int) -> None:
        """A step begins."""
        self.missing = [microbatches * expected for expected in self.expected]
        self.begun = []

    def contributed(self, *grads) -> None:
        """One microbatch has given these tensors, subtrees of the gradients, all that it gives them at this place."""
        for tree in grads:
            for _, view in leaves(tree):
                bucket = self.bucket_of[id(view)]
                self.missing[bucket] -= 1
                if self.missing[bucket] == 0:
                    self.begin(bucket)
        for pending in self.begun:
            pending.poll()

    def begin(self, bucket: int) -> None:
        with self.group.ledger.phase("reduction"):
            self.begun.append(self.group.post_all_reduce(self.flat[self.buckets[bucket].slice], "gradients"))

    def finish(self) -> None:
        """All gradients are complete: wait until all have been added up."""
        assert not any(self.missing), f"contributions are missing: {self.missing}"
        for pending in self.begun:
            pending.wait()
