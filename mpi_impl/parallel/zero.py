"""ZeRO on ranks: the replicas divide the model's states among them (Rajbhandari et al. 2020). Twin: reference/zero.py.

Replica i owns the i-th part of each bucket of the flat buffers (reference/layout.py), and moves only those parameters.
What else it holds is the stage's choice:

    stage   parameters                           gradients                                      Adam's moments
    1       all; each owner sends its own part   all, until the step's end: reduce-scatter      the own part
    2       as in 1                              own part: a reduce-scatter each microbatch     the own part
    3       own part: a unit is gathered         as in 2                                        the own part
            before its use, and freed after it
"""
from collections import Counter
from typing import Any

import numpy as np

from mpi_impl.comm.group import Group, Pending
from mpi_impl.parallel.buffers import Shard, Whole
from mpi_impl.parallel.data_parallel import Gradients
from mpi_impl.parallel.units import Unit
from reference.layout import Bucket, Layout, map_units
from reference.params import assign, initialize_shard, tree_map

# ---- gradients ------------------------------------------------------------------------------------------------------


class ScatteredGradients(Gradients):
    """Stage 1: at the end of a step, each replica gets the sum of its own part only."""

    def begin(self, bucket: Bucket) -> Pending:
        flat = self.own.flat
        return self.group.post_reduce_scatter(flat[bucket.slice], flat[self.layout.own(bucket, self.group.rank)],
                                              "gradients")


class ShardedGradients(Gradients):
    """Stages 2 and 3: each replica holds its own part only, and adds to it after every microbatch.

    A bucket is whole while a backward works on it, and gone once what is in it has been sent. (Where backward is split,
    the next microbatch's I may come before this one's W: then it is sent with a part of the next one's, and stays.)
    """

    def allocate(self) -> None:
        self.own = Shard(np.zeros_like(self.like, shape=self.layout.shard_size))
        self.whole: dict[Bucket, Any] = {}   # those that backwards work on
        self.users = Counter[Bucket]()       # of each: backwards that have begun, and not contributed

    def units(self, tensors):
        return map_units(lambda name, below: WholeWhileUsed(name, below, self), tensors)

    def take(self, unit: str, tensors):
        """A backward begins to work on a unit -> the views of its gradients."""
        bucket = self.layout.home[unit]
        if bucket not in self.whole:
            self.whole[bucket] = np.zeros_like(self.like, shape=bucket.size)
            self.whole_bytes = max(self.whole_bytes, sum(flat.nbytes for flat in self.whole.values()))
        self.users[bucket] += 1
        return self.layout.views_of(tensors, self.whole[bucket], unit, bucket.start)

    def counted(self, bucket: Bucket) -> None:
        """Complete are all contributions of a microbatch, or as many."""
        self.users[bucket] -= 1
        if self.missing[bucket] % self.expected[bucket] == 0:
            flat, part = self.whole[bucket], np.empty_like(self.like, shape=bucket.size // self.layout.parts)
            with self.group.ledger.phase("reduction"):
                self.own.flat[self.layout.in_shard(bucket)] += self.group.post_reduce_scatter(
                    flat, part, "gradients").wait()
            flat[...] = 0
            if not self.users[bucket]:
                del self.whole[bucket]


class WholeWhileUsed(Unit):
    """Gradients that are there from the beginning of a backward until its contribution."""

    def __init__(self, name: str, tensors, gradients: ShardedGradients):
        super().__init__(name, tensors)
        self.gradients = gradients

    def take(self):
        return self.gradients.take(self.name, self.tensors)


# ---- parameters -----------------------------------------------------------------------------------------------------


class Parameters:
    """Stages 0 to 2: a rank's parameters, all of them."""

    def __init__(self, layout: Layout, group: Group, own: Whole):
        self.layout, self.group, self.own = layout, group, own
        self.whole_bytes = 0        # of units that are there for a while

    def units(self, tensors):
        """A model's tree, with a unit in the place of each of its units."""
        return map_units(lambda name, below: Unit(name, self.layout.views_of(below, self.own.flat, name)), tensors)

    def initialize(self, tensors, seed: int, t: int, rank: int) -> None:
        """Initial values, for rank `rank` of t tensor-parallel ones."""
        tree_map(assign, self.layout.views(self.own.flat),
                 initialize_shard(tensors, seed, self.own.flat.dtype, t, rank, self.own.flat))

    def publish(self) -> None:
        """Every replica has moved its own parameters: now all get them all."""
        flat, rank = self.own.flat, self.group.rank
        begun = [self.group.post_all_gather(flat[self.layout.own(bucket, rank)], flat[bucket.slice], "parameters")
                 for bucket in self.layout.buckets]
        for pending in begun:
            pending.wait()


class ShardedParameters(Parameters):
    """Stage 3: a rank's own part of its parameters. Buckets are single units, each of them whole only while it is used.
    """

    def __init__(self, layout: Layout, group: Group, own: Shard, near):
        """What is gathered is of the kind of `near`."""
        super().__init__(layout, group, own)
        self.own: Shard = own
        self.near, self.whole = near, set[str]()     # and the units that are whole now
        self.most_whole = 0                          # at once

    def units(self, tensors):
        return map_units(lambda name, below: GatheredUnit(name, below, self), tensors)

    def initialize(self, tensors, seed: int, t: int, rank: int) -> None:
        def draw(name, below):
            bucket = self.layout.home[name]
            flat = np.zeros_like(self.near, shape=bucket.size)
            tree_map(assign, self.layout.views_of(below, flat, name, bucket.start),
                     initialize_shard(below, seed, flat.dtype, t, rank, flat, name))
            n = bucket.size // self.layout.parts
            self.own.put(self.layout.in_shard(bucket), flat[self.group.rank * n:(self.group.rank + 1) * n])

        map_units(draw, tensors)

    def publish(self) -> None:
        """They are gathered when they are needed."""

    def gather(self, unit: str) -> Pending:
        """Begin to make a unit whole."""
        bucket = self.layout.home[unit]
        self.whole.add(unit)
        self.most_whole = max(self.most_whole, len(self.whole))
        elements = sum(self.layout.home[name].size for name in self.whole)
        self.whole_bytes = max(self.whole_bytes, elements * self.near.itemsize)
        whole = np.empty_like(self.near, shape=bucket.size)
        return self.group.post_all_gather(self.own.take(self.layout.in_shard(bucket)), whole, "parameters")


class GatheredUnit(Unit):
    """Parameters that are whole from the moment when they are needed, or will be next, until they are not."""

    def __init__(self, name: str, tensors, parameters: ShardedParameters):
        super().__init__(name, tensors)
        self.parameters = parameters
        self.pending: Pending | None = None

    def fetch(self) -> None:
        if self.pending is None:
            self.pending = self.parameters.gather(self.name)

    def take(self):
        assert self.pending is not None, "a unit is fetched before it is taken"
        layout = self.parameters.layout
        return layout.views_of(self.tensors, self.pending.wait(), self.name, layout.home[self.name].start)

    def free(self) -> None:
        self.pending = None
        self.parameters.whole.remove(self.name)
