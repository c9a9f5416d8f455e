"""From a rank's number to its place: which ranks share its model's layers (tensor) and which hold copies (data).

Megatron's order: tensor-parallel ranks are neighbours, then come data-parallel ones, then pipeline stages. Neighbours
sit in one server, where the links are fastest, and tensor parallelism is what sends most.

With t = 2 and d = 2:    world       0 1 2 3
                         tensor     [0 1][2 3]
                         data       [0 2][1 3]
"""
from dataclasses import dataclass
from typing import NamedTuple

from mpi_impl.comm.group import Group
from reference.config import ParallelConfig


class Place(NamedTuple):
    """A rank's coordinates."""

    tensor: int
    data: int
    pipeline: int


def place(rank: int, c: ParallelConfig) -> Place:
    """Rank = tensor + t (data + d pipeline)."""
    t, d = c.tensor_model_parallel_size, c.data_parallel_size
    return Place(rank % t, rank // t % d, rank // (t * d))


@dataclass(frozen=True)
class Topology:
    """The groups of one rank."""

    config: ParallelConfig
    world: Group
    tensor: Group   # the t ranks that hold shards of the same layers
    data: Group     # the d ranks that hold the same shard and see different samples
    place: Place


def connect(world: Group, config: ParallelConfig) -> Topology:
    """Form the groups. Called by every rank of a world of config.world_size ranks."""
    at = place(world.rank, config)
    t, d = config.tensor_model_parallel_size, config.data_parallel_size
    return Topology(config, world, tensor=world.part(at.data + d * at.pipeline, "tensor"),
                    data=world.part(at.tensor + t * at.pipeline, "data"), place=at)


def disconnect(topology: Topology) -> None:
    """Free the groups that `connect` formed."""
    topology.tensor.free()
    topology.data.free()
