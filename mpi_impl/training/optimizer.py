"""Adam on one rank's flat buffers, with a global norm that counts every tensor once."""
from math import sqrt

import numpy as np

from mpi_impl.comm.group import Group
from reference.optimizer import OptimizerConfig, adam_update, clip_coefficient, learning_rate, sum_of_squares
from reference.params import Layout


class Adam:
    """Moves a flat buffer of parameters along one of gradients, by the formulas of reference/optimizer.py."""

    def __init__(self, params, layout: Layout, config: OptimizerConfig):
        self.params, self.layout, self.config = params, layout, config
        self.m, self.v = np.zeros_like(params), np.zeros_like(params)
        self.iteration = 0

    def step(self, grads, tensor: Group) -> tuple[float, float]:
        """Clips grads in place, moves the parameters -> the norm before clipping, and the learning rate used."""
        self.iteration += 1
        norm, rate = global_norm(grads, self.layout, tensor), learning_rate(self.config, self.iteration)
        clip = clip_coefficient(norm, self.config.clip_grad)
        if clip < 1:
            grads *= clip
        for segment in self.layout.segments:
            at = segment.slice
            adam_update(self.params[at], grads[at], self.m[at], self.v[at], self.iteration, rate,
                        segment.tensor.decay, self.config)
        return norm, rate


def global_norm(grads, layout: Layout, tensor: Group) -> float:
    """The norm of the whole model's gradient, from one rank's flat buffer.

    Of a split tensor each rank has a part, so the ranks' sums of squares add up. A replicated one is alike on all
    t ranks and is counted once, here, after the sum: inside it, it would count t times.
    """
    split, replicated = 0.0, 0.0
    for segment in layout.segments:
        squares = sum_of_squares(grads[segment.slice])
        if segment.tensor.split is None:
            replicated += squares
        else:
            split += squares
    (split,) = tensor.all_reduce(np.array([split]), "gradient norm")
    return sqrt(split + replicated)
