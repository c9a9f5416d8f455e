"""Asynchronous pipelines on ranks: a stage moves its weights after each microbatch's backward, and nothing is flushed.

The schedule is played once for the whole run, by the same loop as a schedule with a flush (pipeline.py). Which version
of the weights a microbatch meets is the textbook's choice (reference/parallel/stale_weights.py): PipeDream, Harlap et
al. 2018, 1806.03377.
"""
from collections.abc import Sequence

import numpy as np

from mpi_impl.comm.regions import region_of
from mpi_impl.comm.topology import Topology
from mpi_impl.models.model import model_backward, model_forward
from mpi_impl.models.units import Unit
from mpi_impl.parallel.pipeline import Pipeline
from mpi_impl.parallel.sinks import ImmediateSink
from reference.batches import number_of_tokens
from reference.config import ModelConfig
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.models.stage import has_head
from reference.parallel.layout import map_units
from reference.parallel.stale_weights import Versions, check_copies
from reference.params import leaves, tree_map
from reference.schedules.actions import Action, Schedule


class UnflushedPass:
    """The computation behind a schedule's actions, for a rank with one stage."""

    def __init__(self, topology: Topology, microbatches: Sequence, p, schedule: Schedule, c: ModelConfig, lr: float,
                 way: str):
        """Begin with the stage's parameters, a tree of arrays, which are not changed."""
        self.versions, self.microbatches = Versions(p, schedule, way), microbatches
        self.model, self.region, self.lr = c, region_of(topology.tensor, topology.config), lr
        self.losses = np.zeros(len(microbatches))       # where the head is
        self.ages: dict[int, tuple[int, int]] = {}      # by microbatch: updates that its two directions met
        self.caches: dict = {}
        self.compute = {"F": self.forward, "B": self.backward}

    def weights(self, microbatch: int) -> list:
        """Return the weight of each loss of a microbatch in its own mean, for each head."""
        of_heads = self.microbatches[microbatch].weights_of_heads(self.model.heads)
        return [weights / max(weights.sum(), 1) for weights in of_heads]

    def forward(self, action: Action, x):
        """Map the x [b, s, h] of the stage before to x for the next, or to the microbatch's loss."""
        i, version = action.microbatch, self.versions.of_forward(action.microbatch)
        batch = self.microbatches[i]
        context = LayerContext(auxiliary=AuxiliaryLosses(len(batch.tokens), number_of_tokens(batch)))
        y, cache = model_forward(x, units_of(version.params), self.model, batch, self.region, context)
        self.caches[i] = cache, version.updates
        if has_head(version.params, self.model):
            self.losses[i] = sum((loss * weights).sum() for loss, weights in zip(y, self.weights(i), strict=True))
            return None
        return y

    def backward(self, action: Action, dy):
        """Map the dx of the stage after to dx for the stage before, and move the stage's weights."""
        i, version = action.microbatch, self.versions.of_backward(action.microbatch)
        cache, met = self.caches.pop(i)
        self.ages[i] = met, version.updates
        if has_head(version.params, self.model):
            dy = tuple(self.weights(i))
        grads = tree_map(np.zeros_like, version.params)
        dx = model_backward(dy, units_of(version.params), cache, self.model, units_of(grads), ImmediateSink(),
                            self.region)
        self.versions.move(grads, self.lr)
        return dx


def train_without_flush(topology: Topology, microbatches: Sequence, p, schedule: Schedule, c: ModelConfig, lr: float,
                        way: str) -> UnflushedPass:
    """Train by gradient descent, one step for each microbatch, on the ranks of a pipeline, each with one stage (t = 1).

    `way` is one of the textbook's WAYS. Raises UserError where copies of a tensor would move apart.
    """
    check_copies(c, schedule.stages)
    unflushed, like = UnflushedPass(topology, microbatches, p, schedule, c, lr, way), next(leaves(p))[1]
    Pipeline(schedule, topology).play(unflushed.compute, like, (*microbatches[0].tokens.shape, c.hidden_size))
    return unflushed


def units_of(tree):
    """Return a tree of arrays as one of units, which are always there."""
    return map_units(Unit, tree)
