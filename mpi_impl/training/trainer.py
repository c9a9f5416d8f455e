"""One rank's model, and its steps: forward and backward over microbatches, reduction over replicas, Adam."""
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.comm.topology import Topology
from mpi_impl.kernels import accumulate
from mpi_impl.models.gpt import gpt_backward, gpt_forward
from mpi_impl.parallel.data_parallel import all_reduce_gradients
from mpi_impl.training.optimizer import Adam
from reference.config import ModelConfig
from reference.models.gpt import gpt_tensors
from reference.optimizer import OptimizerConfig
from reference.params import HOST, Layout, assign, initialize_shard, tree_map


class StepResult(NamedTuple):
    """What one step reports, alike on all ranks."""

    loss: float            # mean over the global batch
    grad_norm: float       # before clipping
    learning_rate: float


class Trainer:
    """The parameters, gradients and moments of one rank, each a flat buffer with a tree of views."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, topology: Topology, seed: int, dtype, like=HOST):
        """`like` is an array of the library that the buffers shall belong to."""
        self.model, self.topology = model, topology
        self.region = TensorParallelRegion(topology.tensor)
        tensors, t = gpt_tensors(model), topology.tensor.size
        self.layout = Layout(tensors, t)
        self.flat_params = np.zeros_like(like, shape=self.layout.size, dtype=dtype)
        self.flat_grads = np.zeros_like(self.flat_params)
        self.params, self.grads = self.layout.views(self.flat_params), self.layout.views(self.flat_grads)
        tree_map(assign, self.params, initialize_shard(tensors, seed, dtype, t, topology.tensor.rank, like))
        self.optimizer = Adam(self.flat_params, self.layout, optimizer)
        self.ledger = topology.world.ledger

    def step(self, microbatches: Iterable, global_batch_size: int) -> StepResult:
        """One step on this replica's microbatches, pairs of tokens and targets [b, s], of a batch of B sequences."""
        self.flat_grads[...] = 0
        loss = 0.0
        for tokens, targets in microbatches:
            weight = 1 / (global_batch_size * tokens.shape[1])      # every position of the global batch weighs the same
            with self.ledger.phase("forward"):
                losses, cache = gpt_forward(tokens, self.params, self.model, targets, self.region)
            with self.ledger.phase("backward"):
                gpt_backward(np.full_like(losses, weight), self.params, cache, self.model, self.grads, accumulate,
                             self.region)
            loss += losses.sum(dtype=np.float64).item() * weight
        with self.ledger.phase("reduction"):
            all_reduce_gradients(self.flat_grads, self.topology.data)
            (loss,) = self.topology.data.all_reduce(np.array([loss]), "loss")
        with self.ledger.phase("optimizer"):
            norm, rate = self.optimizer.step(self.flat_grads, self.topology.tensor)
        return StepResult(float(loss), norm, rate)

    def evaluate(self, microbatches: Iterable, global_batch_size: int) -> float:
        """The mean loss over a global batch of which this replica has these microbatches; nothing is learned."""
        loss = 0.0
        with self.ledger.phase("evaluation"):
            for tokens, targets in microbatches:
                losses, _ = gpt_forward(tokens, self.params, self.model, targets, self.region)
                loss += losses.sum(dtype=np.float64).item() / (global_batch_size * tokens.shape[1])
            (loss,) = self.topology.data.all_reduce(np.array([loss]), "loss")
        return float(loss)
