"""The topology: which ranks share a rank's layers (tensor), which hold copies of them (data), and which hold the
layers before and after (pipeline).

Megatron's order: tensor-parallel ranks are neighbours, then come data-parallel ones, then those of a pipeline.
Neighbours sit in one server, where the links are fastest, and tensor parallelism sends the most.

With t = p = d = 2:    world       0 1 2 3 4 5 6 7
                       tensor     [0 1][2 3][4 5][6 7]
                       data       [0 2][1 3][4 6][5 7]
                       pipeline   [0 4][1 5][2 6][3 7]
                       model      [0 1 4 5][2 3 6 7]
"""
from dataclasses import dataclass, field
from typing import NamedTuple

from mpi_impl.comm.group import Group
from reference.config import ParallelConfig


class Place(NamedTuple):
    """A rank's coordinates."""

    tensor: int
    data: int
    pipeline: int


def place(rank: int, c: ParallelConfig) -> Place:
    """Return a rank's place: rank = tensor + t (data + d pipeline)."""
    t, d = c.tensor_model_parallel_size, c.data_parallel_size
    return Place(rank % t, rank // t % d, rank // (t * d))


@dataclass(frozen=True)
class Topology:
    """The groups of one rank."""

    config: ParallelConfig
    world: Group
    tensor: Group   # the t ranks that hold shards of the same layers
    data: Group     # the d ranks that hold the same shard and see different samples
    pipeline: Group  # the p ranks that hold the layers of one model between them, in the order of the layers
    model: Group    # the t x p ranks that hold one replica
    embedding: Group | None   # the first and the last rank of a pipeline, if this is one of the two
    place: Place
    copies: dict[int, Group] = field(default_factory=dict)    # what `neighbours` has made

    def neighbours(self, n: int) -> Group:
        """Return the n neighbouring ranks of the tensor group, from a multiple of n on, that this rank is one of.

        They hold copies of a shard, where there are fewer shards than ranks. The first call is made by all of the
        tensor group's ranks.
        """
        if n == self.tensor.size:
            return self.tensor
        if n not in self.copies:
            self.copies[n] = self.tensor.split(self.tensor.rank // n, "copies")
        return self.copies[n]


def connect(world: Group, config: ParallelConfig) -> Topology:
    """Form the groups. Called by every rank of a world of config.world_size ranks."""
    at = place(world.rank, config)
    t, d, p = config.tensor_model_parallel_size, config.data_parallel_size, config.pipeline_model_parallel_size
    pipeline = world.split(at.tensor + t * at.data, "pipeline")
    at_an_end = p > 1 and at.pipeline in (0, p - 1)
    return Topology(config, world, tensor=world.split(at.data + d * at.pipeline, "tensor"),
                    data=world.split(at.tensor + t * at.pipeline, "data"), pipeline=pipeline,
                    model=world.split(at.data, "model"),
                    embedding=pipeline.subgroup([0, p - 1], "embedding") if at_an_end else None, place=at)


def disconnect(topology: Topology) -> None:
    """Free the groups that `connect` formed."""
    for group in (topology.tensor, topology.data, topology.pipeline, topology.model, topology.embedding,
                  *topology.copies.values()):
        if group is not None:
            group.free()
