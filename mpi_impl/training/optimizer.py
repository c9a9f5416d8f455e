"""Adam on what a rank owns of the flat buffers, with a global norm that counts every tensor once.

The formula is in reference/optimizers/adam.py, and the kernels are in mpi_impl/kernels/ (adam_update).
"""
import numpy as np

from mpi_impl import kernels
from mpi_impl.comm.group import Group
from mpi_impl.parallel.buffers import Buffer
from mpi_impl.parallel.tiles import Tile, tiles
from mpi_impl.runtime.arrays import to_host
from reference.optimizers.adam import OptimizerConfig, clip_coefficient, learning_rate
from reference.parallel.layout import Piece


class Adam:
    """Moves master weights along gradients, by the formulas of reference/optimizers/adam.py, tile by tile."""

    def __init__(self, pieces: list[Piece], model: Buffer, states: dict[str, Buffer], config: OptimizerConfig,
                 counted: list[Piece]):
        """Cut the pieces into tiles. `states` are the master weights, "parameters", and the moments, "m" and "v".

        `model` has the parameters that the model computes with: the master weights, or a copy in another format.

        `counted`: the pieces whose squares this rank adds to the norm, see counted_pieces.
        """
        self.tiles, self.model, self.states = tiles(pieces, model.flat), model, states
        self.config, self.counted = config, tiles(counted, model.flat)
        self.iteration = 0      # updates so far

    def step(self, grads: Buffer, everyone: Group, scale: float = 1.0) -> tuple[float, float]:
        """Move the parameters by the clipped gradients; return the norm before clipping, and the learning rate.

        The gradients are `scale` times too large, and divided by it. If their norm is infinite or not a number nothing
        is moved, and the learning rate does not advance. `everyone` are the ranks that own the model between them.
        """
        norm = global_norm(grads, self.counted, everyone) / scale
        rate = learning_rate(self.config, self.iteration + 1)
        if not np.isfinite(norm):
            return norm, rate
        self.iteration += 1
        factor = clip_coefficient(norm, self.config.clip_grad) / scale
        self.update(grads, factor, rate)
        return norm, rate

    def update(self, grads: Buffer, factor: float, rate: float) -> None:
        """Move the parameters along the gradients, which are multiplied by `factor`."""
        for tile in self.tiles:
            place = tile.place
            states = [buffer.load(place) for buffer in self.states.values()]
            model = None if self.model is self.states["parameters"] else self.model.load(place)
            kernels.adam_update(states, grads.load(place), model, tile.runs, factor, self.iteration, rate, self.config)
            for buffer, values in zip(self.states.values(), states):
                buffer.store(place, values)
            if model is not None:
                self.model.store(place, model)


def global_norm(grads: Buffer, counted: list[Tile], everyone: Group) -> float:
    """Return the norm of the whole model's gradient, from what each rank owns of it."""
    squares = sum((kernels.sum_of_squares(grads.load(tile.place)) for tile in counted),
                  np.zeros_like(grads.flat, shape=1, dtype=np.float64))
    return np.sqrt(everyone.all_reduce(to_host(squares), "gradient norm")[0])
