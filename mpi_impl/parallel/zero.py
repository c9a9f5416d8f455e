"""ZeRO on ranks: the replicas divide the model's states among them (Rajbhandari et al. 2020).

Its textbook twin is reference/parallel/zero.py.

Replica i owns the i-th part of each bucket of the flat buffers (`layout`), and moves only those parameters.
What else it holds is the stage's choice:

    stage   parameters                           gradients                                      optimizer states
    1       all; each owner sends its own part   all, until the step's end: reduce-scatter      the own part
    2       as in 1                              own part: a reduce-scatter each microbatch     the own part
    3       own part: a unit is gathered         as in 2                                        the own part
            before its use, and freed after it
"""
from collections import Counter, deque
from typing import Any

import numpy as np

from mpi_impl.comm.group import Group, Pending
from mpi_impl.models.units import Unit
from mpi_impl.parallel.buffers import Buffer, Shard
from mpi_impl.parallel.data_parallel import Gradients
from reference.parallel.layout import Bucket, Layout, map_units
from reference.params import assign, initialize_shard, tree_map

# ---- gradients ------------------------------------------------------------------------------------------------------


class ScatteredGradients(Gradients):
    """Stage 1: at the end of a step, each replica gets the sum of its own part only."""

    def begin(self, bucket: Bucket) -> Pending:
        flat, own = self.own.flat, self.layout.owned_piece(bucket, self.group.rank)
        return self.group.post_reduce_scatter(flat[bucket.slice], flat[own.in_buffer], "gradients")


class ShardedGradients(Gradients):
    """Stages 2 and 3: each replica holds its own part only, and adds to it after every microbatch.

    A bucket is whole while a backward works on it, and gone once what is in it has been sent. (Where backward is split,
    the next microbatch's I may come before this one's W. A bucket is then sent when as many contributions are in as one
    microbatch makes, whosever they are, and stays while anyone works on it.)
    """

    def allocate(self) -> None:
        self.own = Shard(np.zeros_like(self.like, shape=self.layout.shard_size))
        self.whole: dict[Bucket, Any] = {}   # those that backwards work on
        self.users = Counter[Bucket]()       # of each: backwards that have begun, and not contributed

    def units(self, tensors):
        return map_units(lambda name, _: WholeWhileUsed(name, self), tensors)

    def materialize(self, unit: str):
        """A backward begins to work on a unit -> the views of its gradients."""
        bucket = self.layout.bucket_of[unit]
        if bucket not in self.whole:
            self.whole[bucket] = np.zeros_like(self.like, shape=bucket.size)
            self.whole_bytes = max(self.whole_bytes, sum(flat.nbytes for flat in self.whole.values()))
        self.users[bucket] += 1
        return self.layout.unit_views(unit, self.whole[bucket])

    def counted(self, bucket: Bucket) -> None:
        """As many contributions as a microbatch makes are in: what they have added up is sent."""
        self.users[bucket] -= 1
        if self.missing[bucket] % self.expected[bucket] == 0:
            flat, own = self.whole[bucket], self.own.load(self.layout.owned_piece(bucket, self.group.rank))
            with self.group.ledger.phase("reduction"):
                own += self.group.post_reduce_scatter(flat, np.empty_like(own), "gradients").wait()
            flat[...] = 0
            if not self.users[bucket]:
                del self.whole[bucket]


class WholeWhileUsed(Unit):
    """Gradients that are there from the beginning of a backward until its contribution."""

    def __init__(self, name: str, gradients: ShardedGradients):
        self.name, self.gradients = name, gradients

    def wait(self):
        return self.gradients.materialize(self.name)


GRADIENTS = (Gradients, ScatteredGradients, ShardedGradients, ShardedGradients)     # by stage


# ---- parameters -----------------------------------------------------------------------------------------------------


class Parameters:
    """Stages 0 to 2: a rank's parameters, all of them."""

    def __init__(self, layout: Layout, group: Group, own: Buffer):
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
        """Every replica has moved its own parameters: now all get them all. (Each bucket under way takes a copy of the
        own part: two are enough.)
        """
        flat, owned = self.own.flat, [self.layout.owned_piece(bucket, self.group.rank) for bucket in self.layout.buckets]
        under_way = deque[Pending]()
        for piece in owned:
            under_way.append(self.group.post_all_gather(flat[piece.in_buffer], flat[piece.of.slice], "parameters"))
            if len(under_way) == 2:
                under_way.popleft().wait()
        while under_way:
            under_way.popleft().wait()


class ShardedParameters(Parameters):
    """Stage 3: a rank's own part of its parameters. Buckets are single units, each of them whole only while it is used.
    """

    def __init__(self, layout: Layout, group: Group, own: Shard, device_prototype):
        """What is gathered is of the kind of `device_prototype`."""
        super().__init__(layout, group, own)
        self.device_prototype, self.whole = device_prototype, set[str]()    # and the units that are whole now

    def units(self, tensors):
        return map_units(lambda name, _: GatheredUnit(name, self), tensors)

    def initialize(self, tensors, seed: int, t: int, rank: int) -> None:
        def draw(name, below):
            bucket = self.layout.bucket_of[name]
            flat = np.zeros_like(self.device_prototype, shape=bucket.size)
            tree_map(assign, self.layout.unit_views(name, flat),
                     initialize_shard(below, seed, flat.dtype, t, rank, flat, name))
            own = self.layout.owned_piece(bucket, self.group.rank)
            self.own.store(own, flat[own.in_buffer.start - bucket.start:own.in_buffer.stop - bucket.start])

        map_units(draw, tensors)

    def publish(self) -> None:
        """They are gathered when they are needed."""

    def gather(self, unit: str) -> Pending:
        """Begin to make a unit whole."""
        bucket = self.layout.bucket_of[unit]
        self.whole.add(unit)
        elements = sum(self.layout.bucket_of[name].size for name in self.whole)
        self.whole_bytes = max(self.whole_bytes, elements * self.device_prototype.itemsize)
        whole = np.empty_like(self.device_prototype, shape=bucket.size)
        return self.group.post_all_gather(self.own.load(self.layout.owned_piece(bucket, self.group.rank)), whole, "parameters")


class GatheredUnit(Unit):
    """Parameters that are whole from the moment when they are needed, or will be next, until they are not."""

    def __init__(self, name: str, parameters: ShardedParameters):
        self.name, self.parameters = name, parameters
        self.pending: Pending | None = None

    def prefetch(self) -> None:
        if self.pending is None:
            self.pending = self.parameters.gather(self.name)

    def wait(self):
        assert self.pending is not None, "a unit is prefetched before it is waited for"
        return self.parameters.layout.unit_views(self.name, self.pending.wait())

    def release(self) -> None:
        self.pending = None
        self.parameters.whole.remove(self.name)
