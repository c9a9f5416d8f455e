"""A layer or a block with random weights: whole in the textbook, and sharded over the ranks, with the same input.

The type of the tensors tells which layer it is.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.layers.layer import layer_backward, layer_forward
from mpi_impl.parallel.sinks import ImmediateSink
from mpi_impl.runtime.tables import aligned
from reference.config import ModelConfig
from reference.layer_context import TRAINING, LayerContext
from reference.layers import block, layer
from reference.params import split, tree_map
from shardlab.demos.printing import first_elements
from shardlab.demos.runner import Demo

# Forward and backward of the textbook, and of a rank.
BLOCK = block.block_forward, block.block_backward, block_forward, block_backward
LAYER = layer.layer_forward, layer.layer_backward, layer_forward, layer_backward


class Passed(NamedTuple):
    """The results of a forward and a backward, and what the forward kept for the backward."""

    y: Any
    dx: Any
    grads: Any
    cache: Any


class LayerCase:
    """A layer, whole and this rank's shard of it; its input, and the gradient of its output."""

    def __init__(self, demo: Demo, tensors, c: ModelConfig, samples: int, divide: Callable = split):
        """Draw everything, identically on every rank: biases too, or one that is added t times would not show."""
        self.demo, self.tensors, self.c, random = demo, tensors, c, np.random.default_rng(1)
        self.divide: Callable = lambda whole: divide(whole, tensors, demo.n)[demo.rank]
        self.whole = tree_map(lambda tensor: random.normal(tensor.fill, c.init_method_std, tensor.shape), tensors)
        self.mine = self.divide(self.whole)
        self.x, self.dy = random.normal(size=(2, samples, c.max_position_embeddings, c.hidden_size))
        self.functions = BLOCK if isinstance(tensors, block.Block) else LAYER

    def in_textbook(self, context: LayerContext = TRAINING) -> Passed:
        """Run forward and backward of the whole layer."""
        forward, backward, _, _ = self.functions
        y, cache = forward(self.x, self.whole, self.c, context)
        dx, grads = backward(self.dy, self.whole, cache, self.c)
        return Passed(y, dx, grads, cache)

    def on_rank(self, region, held=slice(None), context: LayerContext = TRAINING, name: str = "") -> Passed:
        """Run forward and backward on this rank's part of the input, which it holds outside the region."""
        _, _, forward, backward = self.functions
        grads = tree_map(np.zeros_like, self.mine)
        with self.demo.phase(f"{name}forward"):
            y, cache = forward(self.x[held], self.mine, self.c, region, context)
        with self.demo.phase(f"{name}backward"):
            dx = backward(self.dy[held].copy(), self.mine, cache, self.c, grads, ImmediateSink(), region)
        return Passed(y, dx, grads, cache)

    def compare(self, found: Passed, expected: Passed, held=slice(None)) -> None:
        """Compare this rank's results with the textbook's."""
        self.demo.equal("Y", found.y, expected.y[held])
        self.demo.equal("dX", found.dx, expected.dx[held])
        self.demo.equal("every weight's gradient", found.grads, self.divide(expected.grads))

    def show(self) -> tuple[Passed, Passed]:
        """Run the layer on the ranks, and print what f and g add up. Return its results, and the textbook's."""
        region = WatchedRegion(self.demo.ranks)
        found = self.on_rank(region)
        self.demo.say("\nForward, and backward from a random dY. Weight gradients are where their weights are, and "
                      "are not sent. A rank's\npartial sums, which g adds up forward and f backward; and the sum, the "
                      "same on every rank:")
        self.demo.say_each(aligned(region.sums, left=range(3)))
        return found, self.in_textbook()


class WatchedRegion(TensorParallelRegion):
    """A region that notes what f and g add up."""

    def __init__(self, group: Group):
        super().__init__(group)
        self.sums: list[tuple[str, str, str]] = []

    def leave(self, partial, reason):
        return self.noted("g", super().leave, partial, reason)

    def enter_backward(self, dx, reason):
        return self.noted("f", super().enter_backward, dx, reason)

    def noted(self, operator: str, add_up: Callable, partial, reason: str):
        before = first_elements(partial)
        total = add_up(partial, reason)
        self.sums.append((f"{operator}, {reason}:", before, f"->  {first_elements(total)}"))
        return total
