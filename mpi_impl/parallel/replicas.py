"""Replicas: the whole model, put together from what the ranks hold."""
from collections.abc import Iterator, Mapping, Sequence

from mpi_impl.comm.topology import Place
from reference.config import ParallelConfig
from reference.models.stage import join_stages
from reference.params import join, join_experts


def join_replicas(trees: Mapping[Place, object], tensors: Sequence, parallel: ParallelConfig) -> Iterator:
    """Yield each replica's whole tree, from those of all ranks. `tensors` are the declarations of each pipeline rank.

    Experts are those of the e replicas to which they are dealt out; all else is the replica's own.
    """
    c, e = parallel.context_parallel_size, parallel.expert_model_parallel_size

    def of_replica(replica: int, pipeline: int):
        data, context = divmod(replica, c)
        return join([trees[Place(tensor, context, data, pipeline)]
                     for tensor in range(parallel.tensor_model_parallel_size)], tensors[pipeline])

    for first in range(0, parallel.replicas, e):
        stages = [[of_replica(replica, pipeline) for replica in range(first, first + e)]
                  for pipeline in range(len(tensors))]
        for own in range(e):
            yield join_stages([join_experts(parts, declared, own) for parts, declared in zip(stages, tensors)])
