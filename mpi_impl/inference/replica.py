"""A GPT on t x p ranks that generates tokens: its parameters, without the states of training."""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpi_impl.comm.topology import Topology
from mpi_impl.parallel.buffers import Whole
from mpi_impl.parallel.pipeline import Pipeline
from mpi_impl.parallel.zero import Parameters
from mpi_impl.runtime.arrays import moved_to, narrowed
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig
from reference.kv_cache import KVCache, empty_kv_cache
from reference.models.model import model_tensors
from reference.models.stage import stage_of
from reference.parallel.boxes import without_padding
from reference.parallel.layout import Piece
from reference.parallel.stages import layers_of_rank, layout_of, stages_of_ranks
from reference.schedules.generators import evaluation_schedule

Read = Callable[[Piece], np.ndarray]     # a piece of a tensor -> its elements [piece.size], in float32 or float64


@dataclass(frozen=True)
class Replica:
    """One rank's shard of the model."""

    model: ModelConfig
    topology: Topology
    params: dict[int, Any]     # a GPT of units (parallel/units.py) for each stage
    pipeline: Pipeline         # forward alone, a microbatch at a time
    last_rank: int             # of the pipeline: the one with the logits
    device_prototype: Any                  # an empty array of the kind of the activations

    def empty_kv_cache(self, positions: int, texts: int = 1) -> dict[int, KVCache]:
        """Return an empty cache of `positions` of some texts, for this rank's layers and heads."""
        layers = [layer for params in self.params.values() for layer in params.blocks]
        return empty_kv_cache(self.model, layers, positions, self.device_prototype, texts, self.topology.tensor.size)


def trained_replica(trainer: Trainer) -> Replica:
    """Return a trainer's model: the same arrays. With ZeRO-3 all replicas must generate, with their parameters."""
    return Replica(trainer.state.model, trainer.topology, trainer.state.stage_params, trainer.pipeline("evaluation", 1),
                   trainer.state.last_rank, trainer.state.device_prototype)


def load_replica(model: ModelConfig, topology: Topology, like, read: Read) -> Replica:
    """Load a model's parameters, in the format and on the device of `like`, a shard of a tensor at a time.

    Called by all ranks. Raises UserError, on every rank, if one of them cannot read its own; or for too few layers.
    """
    stages_of_all = stages_of_ranks(model, topology.config)
    stages = stages_of_all[topology.place.pipeline]
    tensors = model_tensors(model, layers_of_rank(stages))
    layout = layout_of(tensors, topology.config)
    parameters = Parameters(layout, topology.replicas, Whole(np.zeros_like(like, shape=layout.size)))

    def fill() -> None:
        for piece in without_padding(layout.pieces(0), topology.place.tensor):
            parameters.own.store(piece, moved_to(narrowed(read(piece), like.dtype), like))

    topology.world.collect_objects(fill, "the weights")
    units = parameters.units(tensors)
    schedule = evaluation_schedule([list(held) for held in stages_of_all], 1)
    return Replica(model, topology, {stage: stage_of(units, layers) for stage, layers in stages.items()},
                   Pipeline(schedule, topology), len(stages_of_all) - 1, like)
