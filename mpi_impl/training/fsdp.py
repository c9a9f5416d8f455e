"""FSDP on ranks, for any list of layers: PyTorch's FullyShardedDataParallel, of the parts that ZeRO-3 has (zero.py).

    fsdp = FSDP(layers, world(), auto_wrap_policy=size_based(100), sharding_strategy="FULL_SHARD", cpu_offload=True)
    adam = fsdp.adam(OptimizerConfig(lr=1e-4, ...))
    fsdp.zero_grad()
    y, caches = fsdp.forward(x)
    fsdp.backward(dy, caches)
    fsdp.step(adam)

A *unit* is some consecutive layers, which the policy chooses: their parameters are one bucket of a flat buffer, sharded
over the ranks. While a unit computes, the next is gathered, and the gradients of the one before are reduce-scattered.
Gradients are summed over the ranks, so each divides its dy by the number of all samples. What each strategy sends is in
a table of reference/parallel/fsdp.py. Zhao et al. 2023, 2304.11277.
"""
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.topology import connect
from mpi_impl.models.units import materialized
from mpi_impl.parallel.buffers import OffloadedShard, Shard
from mpi_impl.parallel.zero import STAGES
from mpi_impl.training.optimizer import Adam
from reference.config import ParallelConfig
from reference.config.checks import require_one_of
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.fsdp import AnyLayer
from reference.parallel.stages import layout_of
from reference.params import Tensor, leaves, tree_map

Policy = Callable[[list[AnyLayer]], list[list[AnyLayer]]]     # divides a model into units

# The stage of ZeRO, and whether a unit is freed after the forward. (Otherwise it stays whole until its backward.)
STRATEGIES = {"NO_SHARD": (0, True), "SHARD_GRAD_OP": (3, False), "FULL_SHARD": (3, True), "HYBRID_SHARD": (3, True)}


def size_based(min_num_params: int) -> Policy:
    """Return a policy that ends a unit as soon as it has this many parameters; what is left joins the last one."""
    def policy(layers: list[AnyLayer]) -> list[list[AnyLayer]]:
        units: list[list[AnyLayer]] = [[]]
        for layer in layers:
            if size(units[-1]) >= min_num_params and layer.params:
                units.append([])
            units[-1].append(layer)
        if len(units) > 1 and size(units[-1]) < min_num_params:
            units[-2:] = [units[-2] + units[-1]]
        return units

    return policy


def size(layers: Sequence[AnyLayer]) -> int:
    return sum(x.size for layer in layers for x in layer.params.values())


class FSDP:
    """This rank's part of a model, sharded in units."""

    def __init__(self, module: Sequence[AnyLayer], process_group: Group, sharding_strategy: str = "FULL_SHARD",
                 auto_wrap_policy: Policy | None = None, cpu_offload: bool = False, instances: int = 1):
        """Keep a shard of the layers' parameters, which are the same on all ranks; without a policy all are one unit.
        An instance is some neighbours that hold one copy. Raises UserError for choices that do not go together.
        """
        require_one_of("sharding_strategy", sharding_strategy, tuple(STRATEGIES))
        if (instances > 1) != (sharding_strategy == "HYBRID_SHARD"):
            raise UserError(f"instances is {instances}: choose at least 2 for HYBRID_SHARD, and 1 for the others.")
        zero_stage, self.reshard_after_forward = STRATEGIES[sharding_strategy]
        config = ParallelConfig(data_parallel_size=process_group.size, zero_stage=zero_stage, cpu_offload=cpu_offload,
                                num_distributed_optimizer_instances=instances)
        self.topology = connect(process_group, config)
        self.units = auto_wrap_policy(list(module)) if auto_wrap_policy else [list(module)]
        params = {"blocks": {i: {j: layer.params for j, layer in enumerate(unit)} for i, unit in enumerate(self.units)}}
        tensors = tree_map(lambda x: Tensor(x.shape, decay=True), params)
        like = next(x for _, x in leaves(params))
        self.layout = layout_of(tensors, config)
        self.zero = STAGES[config.zero_stage](self.layout, self.topology, like, like, {}, self.new_shard)
        values = dict(leaves(params))
        for piece in self.zero.pieces:
            start = piece.in_buffer.start - piece.of.offset
            self.zero.parameters.own.store(piece, values[piece.of.name].reshape(-1)[start:start + piece.size])
        self.params, self.grads = (held.units(tensors)["blocks"]
                                   for held in (self.zero.parameters, self.zero.gradients))

    def new_shard(self, like) -> Shard:
        """Allocate zeros of the kind of `like` for what this rank owns."""
        if self.topology.config.cpu_offload:
            return OffloadedShard(self.layout.shard_size, like.dtype, like)
        return Shard(np.zeros_like(like, shape=self.layout.shard_size))

    # ---- a step ----

    def zero_grad(self, microbatches: int = 1) -> None:
        """Begin a step in which each rank sees this many microbatches."""
        self.zero.gradients.expect(microbatches)

    def forward(self, x) -> tuple[Any, list]:
        """Map this rank's x to its y, and return the caches for `backward`."""
        caches: list[list] = []
        for i, params in self.in_use(range(len(self.units)), self.reshard_after_forward):
            caches.append([])
            for layer, p in zip(self.units[i], params.values()):
                x, cache = layer.forward(x, p)
                caches[-1].append(cache)
            del params, p
        return x, caches

    def backward(self, dy, caches: list) -> Any:
        """Return this rank's dx. The sums of the gradients over the ranks begin."""
        for i, params in self.in_use(range(len(self.units))[::-1], True):
            with materialized(self.grads[i]) as totals:
                for j in reversed(range(len(params))):
                    dy, grads = self.units[i][j].backward(dy, params[j], caches[i][j])
                    for name, grad in grads.items():
                        totals[j][name] += grad
            self.zero.gradients.contributed(self.grads[i])
            del params
        return dy

    def in_use(self, units: Sequence[int], reshard: bool) -> Iterator[tuple[int, dict]]:
        """Yield the units, gathered. While one computes, the next is gathered."""
        for i, following in zip(units, [*units[1:], None]):
            self.params[i].prefetch()
            if following is not None:
                self.params[following].prefetch()
            yield i, self.params[i].wait()
            if reshard:
                self.params[i].release()

    def step(self, adam: Adam) -> float:
        """Wait for the sums, and move this rank's shards; return the norm of the gradient before clipping."""
        self.zero.gradients.finish()
        norm, _ = adam.step(self.zero.gradients.own, self.zero.owners)
        return norm

    def adam(self, config: OptimizerConfig) -> Adam:
        """Return the optimizer of this rank's shards."""
        own, like = self.zero.parameters.own, self.zero.gradients.like
        states = {"parameters": own, "m": self.new_shard(like), "v": self.new_shard(like)}
        return Adam(self.zero.pieces, own, states, config, list(filter(self.zero.counts, self.zero.pieces)))

    def parameters(self) -> list[dict[str, Any]]:
        """Return copies of all layers' parameters; called by all ranks."""
        found: list[dict] = []
        for i in range(len(self.units)):
            with materialized(self.params[i]) as params:
                found += tree_map(np.copy, params).values()
        return found
