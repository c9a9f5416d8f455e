"""The topology: which ranks share a rank's layers (tensor), which hold the other positions of its samples (context),
which see other samples (data), and which hold the layers before and after (pipeline).

Megatron's order: tensor-parallel ranks are neighbours, then come context-parallel ones, then data-parallel ones, then
those of a pipeline. Neighbours sit in one server, where the links are fastest, and tensor parallelism sends the most.

With t = p = d = 2:    world       0 1 2 3 4 5 6 7
                       tensor     [0 1][2 3][4 5][6 7]
                       data       [0 2][1 3][4 6][5 7]
                       pipeline   [0 4][1 5][2 6][3 7]
                       model      [0 1 4 5][2 3 6 7]

With t = c = d = 2:    tensor     [0 1][2 3][4 5][6 7]
                       context    [0 2][1 3][4 6][5 7]
                       data       [0 4][1 5][2 6][3 7]
                       replicas   [0 2 4 6][1 3 5 7]
                       pipeline   [0][1][2][3][4][5][6][7]
                       model      [0 1][2 3][4 5][6 7]

Experts are dealt out to e neighbours among the replicas, whether they differ in positions or in samples. The ranks with
the same experts are d c / e.

With d = 4, p = e = 2: data       [0 1 2 3][4 5 6 7]
                       pipeline   [0 4][1 5][2 6][3 7]
                       tensor     [0][1][2][3][4][5][6][7]
                       model      [0 4][1 5][2 6][3 7]
                       expert     [0 1][2 3][4 5][6 7]
                       expert replicas  [0 2][1 3][4 6][5 7]
                       holders    [0 1 4 5][2 3 6 7]

Hybrid sharding divides the replicas into several instances, each of neighbours that shard a copy of the model's states.
So the gathering of parameters stays inside a server, if the instance does.

With t = 2, d = 4 in 2 instances:
                       data       [0 2 4 6][1 3 5 7]
                       shards     [0 2][1 3][4 6][5 7]
                       instances  [0 4][1 5][2 6][3 7]
                       tensor     [0 1][2 3][4 5][6 7]
                       pipeline   [0][1][2][3][4][5][6][7]
                       model      [0 1][2 3][4 5][6 7]
"""
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpi_impl.comm.group import Group
from reference.config import ParallelConfig


class Place(NamedTuple):
    """A rank's coordinates."""

    tensor: int
    context: int
    data: int
    pipeline: int

    @property
    def replica(self) -> tuple[int, int]:
        """Return which copy of the model the rank has a shard of."""
        return self.context, self.data


def place(rank: int, c: ParallelConfig) -> Place:
    """Return a rank's place: rank = tensor + t (context + c (data + d pipeline))."""
    rest, tensor = divmod(rank, c.tensor_model_parallel_size)
    rest, context = divmod(rest, c.context_parallel_size)
    pipeline, data = divmod(rest, c.data_parallel_size)
    return Place(tensor, context, data, pipeline)


def rank_at(at: Place, c: ParallelConfig) -> int:
    """Return the rank at a place: the inverse of `place`."""
    replica = at.context + c.context_parallel_size * at.data
    return at.tensor + c.tensor_model_parallel_size * (replica + c.replicas * at.pipeline)


@dataclass(frozen=True)
class Topology:
    """The groups of one rank."""

    config: ParallelConfig
    world: Group
    tensor: Group   # the t ranks that hold shards of the same layers
    context: Group | None   # the c ranks that see the same samples, each other positions of them; None: c = 1
    data: Group     # the d ranks that hold the same shard and see different samples
    replicas: Group  # the c d ranks that hold the same shard; with c = 1, `data` itself
    pipeline: Group  # the p ranks that hold the layers of one model between them, in the order of the layers
    model: Group    # the t x p ranks that hold one replica, but for experts that are dealt out
    expert: Group | None    # the e ranks to which experts are dealt out; None: e = 1
    expert_replicas: Group  # the c d / e ranks that hold the same experts; with e = 1, `replicas` itself
    holders: Group  # the t x p x e ranks that hold one replica with all experts; with e = 1, `model` itself
    shards: Group   # the ranks that shard one copy of the model's states (ZeRO); without hybrid sharding, `replicas`
    instances: Group | None   # the ranks with the same shard of those copies; None without hybrid sharding
    embedding: Group | None   # the first and the last rank of a pipeline, if this is one of the two
    place: Place
    copies: dict[int, Group] = field(default_factory=dict)    # what `neighbours` has made

    def neighbours(self, n: int) -> Group:
        """Return the n neighbouring ranks of the tensor group, from a multiple of n on, that this rank is one of.

        They hold copies of a shard, where there are fewer shards than ranks. The first call is made by all of them.
        """
        if n == self.tensor.size:
            return self.tensor
        if n not in self.copies:
            first = self.tensor.rank // n * n
            self.copies[n] = self.tensor.subgroup(range(first, first + n), "copies")
        return self.copies[n]

    @property
    def expert_rank(self) -> int:
        """Return which of the experts that are dealt out this rank has."""
        return self.expert.rank if self.expert else 0


def connect(world: Group, config: ParallelConfig) -> Topology:
    """Form the groups. Called by every rank of a world of config.world_size ranks."""
    at = place(world.rank, config)
    t, c, d, p = (config.tensor_model_parallel_size, config.context_parallel_size, config.data_parallel_size,
                  config.pipeline_model_parallel_size)
    replica = at.context + c * at.data
    pipeline = world.split(at.tensor + t * replica, "pipeline")
    data = world.split(at.tensor + t * (at.context + c * at.pipeline), "data")
    at_an_end = p > 1 and at.pipeline in (0, p - 1)
    replicas = world.split(at.tensor + t * at.pipeline, "replicas") if c > 1 else data
    model = world.split(replica, "model")
    return Topology(config, world, tensor=world.split(replica + c * d * at.pipeline, "tensor"),
                    context=world.split(at.tensor + t * (at.data + d * at.pipeline), "context") if c > 1 else None,
                    data=data, replicas=replicas, pipeline=pipeline, model=model,
                    **expert_groups(world, config, at, replica, replicas, model),
                    **sharding_groups(world, config, at, replica, replicas),
                    embedding=pipeline.subgroup([0, p - 1], "embedding") if at_an_end else None, place=at)


def expert_groups(world: Group, config: ParallelConfig, at: Place, replica: int, replicas: Group,
                  model: Group) -> dict[str, Any]:
    """Form the groups of expert parallelism."""
    e, t = config.expert_model_parallel_size, config.tensor_model_parallel_size
    if e == 1:
        return {"expert": None, "expert_replicas": replicas, "holders": model}
    (among, own), shard = divmod(replica, e), at.tensor + t * at.pipeline
    groups = config.replicas // e
    return {"expert": world.split(among + groups * shard, "expert"),
            "expert_replicas": world.split(own + e * shard, "expert replicas"),
            "holders": world.split(among, "holders")}


def sharding_groups(world: Group, config: ParallelConfig, at: Place, replica: int, replicas: Group) -> dict[str, Any]:
    """Form the groups of hybrid sharding."""
    instances, n = config.num_distributed_optimizer_instances, config.instance_size
    if instances == 1:
        return {"shards": replicas, "instances": None}
    (among, own), shard = divmod(replica, n), at.tensor + config.tensor_model_parallel_size * at.pipeline
    return {"shards": world.split(among + instances * shard, "shards"),
            "instances": world.split(own + n * shard, "instances")}


def disconnect(topology: Topology) -> None:
    """Free the groups that `connect` formed."""
    between = (topology.context, topology.replicas) if topology.context else ()
    if topology.expert:
        between = (*between, topology.expert, topology.expert_replicas, topology.holders)
    if topology.instances:
        between = (*between, topology.shards, topology.instances)
    for group in (topology.tensor, *between, topology.data, topology.pipeline, topology.model, topology.embedding,
                  *topology.copies.values()):
        if group is not None:
            group.free()
