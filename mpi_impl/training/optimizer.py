"""Adam on what a rank owns of the flat buffers, with a global norm that counts every tensor once."""
from collections.abc import Iterator
from math import isfinite, sqrt

import numpy as np

from mpi_impl.arrays import narrowed
from mpi_impl.comm.group import Group
from mpi_impl.parallel.buffers import Buffer
from reference.layout import Piece
from reference.optimizer import OptimizerConfig, adam_update, clip_coefficient, learning_rate, sum_of_squares

TILE = 1 << 16      # elements at a time: they stay in the cache, and no more of a far shard is near at once


class Adam:
    """Moves master weights along gradients, by the formulas of reference/optimizer.py, piece by piece."""

    def __init__(self, pieces: list[Piece], model: Buffer, states: dict[str, Buffer], config: OptimizerConfig,
                 counted: list[Piece]):
        """`states` are the master weights, "parameters", and the moments, "m" and "v". `model` has the parameters that
        the model computes with: the master weights themselves, or a copy in another format.

        `counted`: the pieces whose squares this rank adds to the norm, as counted_pieces tells.
        """
        self.pieces, self.model, self.states, self.config, self.counted = pieces, model, states, config, counted
        self.iteration = 0      # updates so far

    def step(self, grads: Buffer, everyone: Group, scale: float = 1.0) -> tuple[float, float]:
        """Clips grads in place, moves the parameters -> the norm before clipping, and the learning rate.

        The gradients are `scale` times too large, and divided by it. If their norm is infinite or not a number nothing
        is moved, nor does the learning rate advance. `everyone` are the ranks that own the model between them.
        """
        norm = global_norm(grads, self.counted, everyone) / scale
        rate = learning_rate(self.config, self.iteration + 1)
        if not isfinite(norm):
            return norm, rate
        self.iteration += 1
        factor = clip_coefficient(norm, self.config.clip_grad) / scale
        for piece in tiles(self.pieces):
            grad = grads.load(piece)
            if factor != 1:
                grad *= factor
            param, m, v = states = [buffer.load(piece) for buffer in self.states.values()]
            adam_update(param, grad, m, v, self.iteration, rate, piece.of.tensor.decay, self.config)
            for buffer, values in zip(self.states.values(), states):
                buffer.store(piece, values)
            self.give_to_model(piece, param)
        return norm, rate

    def give_to_model(self, piece: Piece, param) -> None:
        """Give the model the master weights of a piece, in its own format."""
        if self.model is not self.states["parameters"]:
            self.model.store(piece, narrowed(param, self.model.flat.dtype))

    def take_over(self) -> None:
        """The master weights have got new values: the model gets them, too."""
        for piece in tiles(self.pieces):
            self.give_to_model(piece, self.states["parameters"].load(piece))


def tiles(pieces: list[Piece]) -> Iterator[Piece]:
    """The same pieces, none of more than TILE elements."""
    for of, *places in pieces:
        for starts in zip(*(range(place.start, place.stop, TILE) for place in places)):
            yield Piece(of, *(slice(start, min(start + TILE, place.stop)) for start, place in zip(starts, places)))


def global_norm(grads: Buffer, counted: list[Piece], everyone: Group) -> float:
    """The norm of the whole model's gradient, from what each rank owns of it."""
    squares = sum(sum_of_squares(grads.load(piece)) for piece in counted)
    return sqrt(everyone.all_reduce(np.array([squares], np.float64), "gradient norm")[0])


def counted_pieces(pieces: list[Piece], tensor_rank: int, counted_elsewhere: str) -> list[Piece]:
    """What a rank adds to the norm, so that the sum over all that own the model counts every element once.

    Of a split tensor each of t ranks has a part; a replicated one is alike on all of them, and the first one counts it.
    `counted_elsewhere` is the name of a tensor of which another pipeline rank counts its copy, or "".
    """
    return [piece for piece in pieces if piece.of.name != counted_elsewhere
            and (piece.of.tensor.split is not None or tensor_rank == 0)]
