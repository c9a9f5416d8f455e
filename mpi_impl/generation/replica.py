"""A GPT on t x p ranks that can be asked for words: its parameters, and nothing that training needs beside them."""
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
from reference.kv_cache import Past, no_past
from reference.models.model import model_tensors
from reference.models.stage import stage_of
from reference.parallel.boxes import without_padding
from reference.parallel.layout import Piece
from reference.parallel.stages import layers_of_rank, layout_of, stages_of_ranks
from reference.schedules.generators import evaluation_schedule

Read = Callable[[Piece], np.ndarray]     # a piece of a tensor -> its elements [piece.size], in float32 or float64


@dataclass(frozen=True)
class Replica:
    """One rank's part of it."""

    model: ModelConfig
    topology: Topology
    params: dict[int, Any]     # by stage: GPTs, of units (parallel/units.py)
    pipeline: Pipeline         # forward alone, a microbatch at a time
    last_rank: int             # of the pipeline: the one with the logits
    near: Any                  # an empty array of the kind of the activations

    def no_past(self, positions: int) -> dict[int, Past]:
        """Room for the keys and values of so many positions of one text: of this rank's layers, and its heads."""
        layers = [layer for params in self.params.values() for layer in params.blocks]
        return no_past(self.model, layers, positions, self.near, t=self.topology.tensor.size)


def trained(trainer: Trainer) -> Replica:
    """The model of a trainer: the same arrays. With ZeRO-3 all replicas must generate, with their parameters."""
    return Replica(trainer.model, trainer.topology, trainer.stage_params, trainer.pipeline("evaluation", 1),
                   trainer.last_rank, trainer.near)


def loaded(model: ModelConfig, topology: Topology, near, read: Read) -> Replica:
    """A model whose parameters are read, in the format and on the device of `near`, a tensor's part at a time.

    Called by all ranks. Raises UserError, on all alike, if one of them cannot read its own; or for too few layers.
    """
    stages_of_all = stages_of_ranks(model, topology.config)
    stages = stages_of_all[topology.place.pipeline]
    tensors = model_tensors(model, layers_of_rank(stages))
    layout = layout_of(tensors, topology.config)
    parameters = Parameters(layout, topology.data, Whole(np.zeros_like(near, shape=layout.size)))

    def fill() -> None:
        for piece in without_padding(layout.pieces(0), topology.place.tensor):
            parameters.own.store(piece, moved_to(narrowed(read(piece), near.dtype), near))

    topology.world.collect_objects(fill, "the weights")
    units = parameters.units(tensors)
    schedule = evaluation_schedule([list(held) for held in stages_of_all], 1)
    return Replica(model, topology, {stage: stage_of(units, layers) for stage, layers in stages.items()},
                   Pipeline(schedule, topology), len(stages_of_all) - 1, near)
