"""ZeRO on ranks: the replicas divide the model's states among them (Rajbhandari et al. 2020).

Replica i owns the i-th part of each bucket of the flat buffers (`layout`), and updates only those parameters. What else
it holds depends on the stage, and each stage is an object with the same methods:

    stage   parameters                            gradients                                     optimizer states
    0       all                                   all: all-reduced                              all
    1       all; gathered after the update        all, until the step's end: reduce-scattered   the owned part
    2       as in 1                               owned part: reduce-scattered each microbatch  the owned part
    3       owned part: a unit is gathered        as in 2                                       the owned part
            before its use, and released after it

With hybrid sharding the replicas of an *instance* divide a copy of the states among them, as above, and gather only
from each other. The reduction ends with another sum: of the owned part, over the ranks that own it in all instances.

The textbook twin is reference/parallel/zero.py.
"""
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpi_impl.comm.group import Group, Pending
from mpi_impl.comm.topology import Topology
from mpi_impl.models.units import Unit
from mpi_impl.parallel.buffers import Buffer, Shard, Whole
from mpi_impl.parallel.data_parallel import Gradients, group_of, reason_of
from reference.parallel.layout import Bucket, Layout, Piece, map_units
from reference.params import assign, initialize_shard, tree_map

# ---- gradients ------------------------------------------------------------------------------------------------------


class ScatteredGradients(Gradients):
    """Stage 1: at the end of a step, each replica gets the sum of its own part only."""

    def post(self, bucket: Bucket, flat) -> Pending:
        own = self.own.load(self.layout.owned_piece(bucket, self.group.rank))
        return group_of(self, bucket).post_reduce_scatter(flat, own, reason_of(bucket), bucket.sizes)


class ShardedGradients(Gradients):
    """Stages 2 and 3: each replica holds its own part only, and adds to it after every microbatch.

    A bucket is materialized while a backward works on it. Then it is sent, while the backward works on the next one,
    and released when that one is sent, too. (Where backward is split, the next microbatch's I may come before this
    one's W. A bucket is then sent when it has as many contributions as one microbatch makes, from whichever
    microbatches; while any backward works on it, a copy is sent.)
    """

    whole_after_backward = False

    def allocate(self) -> None:
        self.own = Shard(np.zeros_like(self.like, shape=self.layout.shard_size))
        self.whole: dict[Bucket, Any] = {}   # the materialized buckets
        self.users = Counter[Bucket]()       # backwards that have begun on each bucket, and not yet contributed

    def units(self, tensors):
        return map_units(lambda name, _: GradientsOfUnit(name, self), tensors)

    def materialize(self, unit: str):
        """Return the views of a unit's gradients: a backward begins to work on it."""
        buckets = self.layout.buckets_of(unit)
        for bucket in buckets:
            if bucket not in self.whole:
                while bucket in (reduction.bucket for reduction in self.begun):     # since the microbatch before
                    self.finish_first(1)
                self.whole[bucket] = np.zeros_like(self.like, shape=bucket.size)
                self.count_bytes()
            self.users[bucket] += 1
        return self.layout.unit_views(unit, *(self.whole[bucket] for bucket in buckets))

    def count_bytes(self) -> None:
        """Count the buckets that are materialized or under way, and the sums to come."""
        arrays = (*self.whole.values(), *(one for _, flat, pending, _ in self.begun for one in (flat, pending.x)))
        self.whole_bytes = max(self.whole_bytes, sum(one.nbytes for one in arrays))

    def contributed(self, *units) -> None:
        """Count a contribution. If sums begin with it, those that began before are finished: they have had the time
        in which a backward computed.
        """
        before = len(self.begun)
        super().contributed(*units)
        self.count_bytes()
        if len(self.begun) > before:
            self.finish_first(before)

    def counted(self, bucket: Bucket) -> None:
        """Begin the bucket's sum if it has as many contributions as a microbatch makes."""
        self.users[bucket] -= 1
        if self.missing[bucket] % self.expected[bucket] == 0:
            self.begin(bucket)

    def complete(self, bucket: Bucket):
        flat = self.whole.pop(bucket)
        if self.users[bucket]:
            self.whole[bucket], flat = flat, flat.copy()
            self.whole[bucket][...] = 0
        return flat

    def post(self, bucket: Bucket, flat) -> Pending:
        total = np.empty_like(flat, shape=bucket.size // bucket.parts)
        return group_of(self, bucket).post_reduce_scatter(flat, total, reason_of(bucket))

    def keep(self, bucket: Bucket, total) -> None:
        """Add what a microbatch has contributed."""
        own = self.own.load(self.layout.owned_piece(bucket, self.group.rank))
        own += total


class GradientsOfUnit(Unit):
    """Gradients that are materialized from the beginning of a backward until its contribution."""

    def __init__(self, name: str, gradients: ShardedGradients):
        self.name, self.gradients = name, gradients

    def wait(self):
        return self.gradients.materialize(self.name)


# ---- parameters -----------------------------------------------------------------------------------------------------


class Parameters:
    """Stages 0 to 2: all of a rank's parameters."""

    def __init__(self, layout: Layout, group: Group, own: Buffer, expert_group: Group | None = None):
        self.layout, self.group, self.expert_group, self.own = layout, group, expert_group, own
        self.whole_bytes = 0        # the most bytes of units that were gathered at the same time

    def units(self, tensors):
        """Return a model's tree with units in it."""
        return map_units(lambda name, below: Unit(name, self.layout.views_of(below, self.own.flat, name)), tensors)

    def initialize(self, tensors, seed: int, t: int, rank: int) -> None:
        """Draw the initial values, for rank `rank` of t tensor-parallel ones."""
        tree_map(assign, self.layout.views(self.own.flat), self.draw(tensors, seed, t, rank, self.own.flat))

    def draw(self, tensors, seed: int, t: int, rank: int, like, prefix: str = ""):
        """Draw the initial values of this rank's shards of some tensors. e neighbours share the experts."""
        e = self.layout.e
        return initialize_shard(tensors, seed, like.dtype, t, rank, like, prefix, e, self.group.rank % e)

    def gather_updated(self) -> None:
        """Gather what every replica has updated. Each bucket in flight holds a copy of the owned part, so there are at
        most two.
        """
        flat, in_flight = self.own.flat, deque[Pending]()
        for bucket in self.layout.buckets:
            own = self.layout.owned_piece(bucket, self.group.rank)
            in_flight.append(group_of(self, bucket).post_all_gather(flat[own.in_buffer], flat[bucket.slice],
                                                                    "parameters", bucket.sizes))
            if len(in_flight) == 2:
                in_flight.popleft().wait()
        while in_flight:
            in_flight.popleft().wait()


class ShardedParameters(Parameters):
    """Stage 3: the owned part of a rank's parameters. Each bucket is one unit, gathered only while it is used."""

    def __init__(self, layout: Layout, group: Group, own: Shard, device_prototype, expert_group: Group | None = None):
        """Gather units into arrays of the kind of `device_prototype`."""
        super().__init__(layout, group, own, expert_group)
        self.device_prototype, self.whole = device_prototype, set[str]()    # and the units that are gathered now

    def units(self, tensors):
        return map_units(lambda name, _: GatheredUnit(name, self), tensors)

    def initialize(self, tensors, seed: int, t: int, rank: int) -> None:
        def draw(name, below):
            buckets = self.layout.buckets_of(name)
            flats = [np.zeros_like(self.device_prototype, shape=bucket.size) for bucket in buckets]
            tree_map(assign, self.layout.unit_views(name, *flats), self.draw(below, seed, t, rank, flats[0], name))
            for bucket, flat in zip(buckets, flats):
                own = self.layout.owned_piece(bucket, self.group.rank)
                self.own.store(own, flat[own.in_buffer.start - bucket.start:own.in_buffer.stop - bucket.start])

        map_units(draw, tensors)

    def gather(self, unit: str) -> list[Pending]:
        """Begin to gather the buckets of a unit."""
        self.whole.add(unit)
        elements = sum(bucket.size for name in self.whole for bucket in self.layout.buckets_of(name))
        self.whole_bytes = max(self.whole_bytes, elements * self.device_prototype.itemsize)
        return [self.gather_bucket(bucket) for bucket in self.layout.buckets_of(unit)]

    def gather_bucket(self, bucket: Bucket) -> Pending:
        own = self.own.load(self.layout.owned_piece(bucket, self.group.rank))
        whole = np.empty_like(self.device_prototype, shape=bucket.size)
        return group_of(self, bucket).post_all_gather(own, whole, "parameters")


class GatheredUnit(Unit):
    """Parameters that are gathered from their prefetch until their release."""

    def __init__(self, name: str, parameters: ShardedParameters):
        self.name, self.parameters = name, parameters
        self.pending: list[Pending] | None = None

    def prefetch(self) -> None:
        if self.pending is None:
            self.pending = self.parameters.gather(self.name)

    def wait(self):
        assert self.pending is not None, "a unit is prefetched before it is waited for"
        return self.parameters.layout.unit_views(self.name, *(pending.wait() for pending in self.pending))

    def release(self) -> None:
        self.pending = None
        self.parameters.whole.remove(self.name)


# ---- the stages -----------------------------------------------------------------------------------------------------


class Stage0:
    """Data parallelism without ZeRO: every replica holds the whole model, and all make the same update."""

    gathers_parameters = False            # so a replica can compute without the others
    gradients_type: type[Gradients] = Gradients

    def __init__(self, layout: Layout, topology: Topology, device_prototype, main, contributions: Mapping[str, int],
                 new_shard: Callable[[Any], Shard]):
        """Allocate parameters of the kind of `device_prototype` and gradients of the kind of `main`.

        `new_shard(like)` allocates a shard; for `contributions` see Gradients.
        """
        self.layout, self.topology, self.new_shard = layout, topology, new_shard
        self.parameters = self.make_parameters(device_prototype)
        self.gradients = self.gradients_type(layout, topology.shards, contributions, main,
                                             topology.expert_replicas, topology.instances)
        self.pieces = layout.pieces(self.part)      # what this rank owns, so what its optimizer updates

    def make_parameters(self, like) -> Parameters:
        """Allocate the parameters."""
        return Parameters(self.layout, self.topology.shards, Whole(np.zeros_like(like, shape=self.layout.size)),
                          self.topology.expert_replicas)

    @property
    def part(self) -> int:
        """Return which part of each bucket this rank owns."""
        return 0

    @property
    def owners(self) -> Group:
        """Return the ranks that own the whole model between them."""
        return self.topology.holders

    def counts(self, piece: Piece) -> bool:
        """Report whether this rank counts a piece in the norm: of e ranks that hold copies among experts, the first."""
        return self.topology.expert_rank == 0 or piece.of.tensor.dealt

    def saves(self, piece: Piece) -> bool:
        """Report whether this rank saves a piece: of the ranks that hold copies of it, the first."""
        group = self.topology.expert_replicas if piece.of.tensor.dealt else self.topology.replicas
        return group.rank == 0

    def finish_update(self) -> None:
        """Do nothing: all replicas have made the same update."""


class Stage1(Stage0):
    """ZeRO-1: each replica owns a part of every bucket, and has optimizer states for that part only."""

    gradients_type: type[Gradients] = ScatteredGradients

    @property
    def part(self) -> int:
        return self.topology.shards.rank

    @property
    def owners(self) -> Group:
        return self.topology.world

    def counts(self, piece: Piece) -> bool:
        """Report whether this rank counts a piece in the norm: of instances, which hold the same, the first does."""
        return self.topology.instances is None or self.topology.instances.rank == 0

    def saves(self, piece: Piece) -> bool:
        return True

    def finish_update(self) -> None:
        """Gather what the other replicas have updated."""
        self.parameters.gather_updated()


class Stage2(Stage1):
    """ZeRO-2: each replica holds the gradients of its own part only."""

    gradients_type = ShardedGradients


class Stage3(Stage2):
    """ZeRO-3: each replica holds the parameters of its own part only."""

    gathers_parameters = True

    def make_parameters(self, like) -> Parameters:
        return ShardedParameters(self.layout, self.topology.shards, self.new_shard(like), like,
                                 self.topology.expert_replicas)

    def finish_update(self) -> None:
        """Do nothing: parameters are gathered where they are used."""


STAGES: tuple[type[Stage0], ...] = (Stage0, Stage1, Stage2, Stage3)
