"""Adam on one rank's flat buffers, with a global norm that counts every tensor once."""
from math import sqrt

import numpy as np

from mpi_impl.comm.group import Group
from reference.optimizer import OptimizerConfig, adam_update, clip_coefficient, learning_rate, sum_of_squares
from reference.params import Layout, Segment


class Adam:
    """Moves a flat buffer of parameters along one of gradients, by the formulas of reference/optimizer.py."""

    def __init__(self, params, layout: Layout, config: OptimizerConfig, counted: list[Segment]):
        """`counted`: the tensors whose squares this rank adds to the norm, as counted_segments tells."""
        self.params, self.layout, self.config, self.counted = params, layout, config, counted
        self.m, self.v = np.zeros_like(params), np.zeros_like(params)
        self.iteration = 0

    def step(self, grads, model: Group) -> tuple[float, float]:
        """Clips grads in place, moves the parameters -> the norm before clipping, and the learning rate used."""
        self.iteration += 1
        norm, rate = global_norm(grads, self.counted, model), learning_rate(self.config, self.iteration)
        clip = clip_coefficient(norm, self.config.clip_grad)
        if clip < 1:
            grads *= clip
        for segment in self.layout.segments:
            at = segment.slice
            adam_update(self.params[at], grads[at], self.m[at], self.v[at], self.iteration, rate,
                        segment.tensor.decay, self.config)
        return norm, rate


def global_norm(grads, counted: list[Segment], model: Group) -> float:
    """The norm of the whole model's gradient, from the flat buffers of the ranks that hold it between them."""
    squares = sum(sum_of_squares(grads[segment.slice]) for segment in counted)
    return sqrt(model.all_reduce(np.array([squares], np.float64), "gradient norm")[0])


def counted_segments(layout: Layout, tensor_rank: int, counted_elsewhere: str) -> list[Segment]:
    """What a rank adds to the norm, so that the sum over a replica's ranks counts every tensor once.

    Of a split tensor each of t ranks has a part; a replicated one is alike on all of them, and the first one counts it.
    `counted_elsewhere` is the name of a tensor of which another pipeline rank counts its copy, or "".
    """
    return [segment for segment in layout.segments
            if segment.name != counted_elsewhere and (segment.tensor.split is not None or tensor_rank == 0)]
