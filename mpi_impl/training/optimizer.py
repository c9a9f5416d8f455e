"""Adam on what a rank owns of the flat buffers, with a global norm that counts every tensor once."""
from collections.abc import Iterator
from math import sqrt

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.parallel.buffers import Shard, Whole
from reference.layout import Piece
from reference.optimizer import OptimizerConfig, adam_update, clip_coefficient, learning_rate, sum_of_squares

TILE = 1 << 16      # elements at a time: they stay in the cache, and no more of a far shard is near at once


class Adam:
    """Moves parameters along gradients, by the formulas of reference/optimizer.py, piece by piece."""

    def __init__(self, pieces: list[Piece], params: Whole, moments: tuple[Shard, Shard], config: OptimizerConfig,
                 counted: list[Piece]):
        """`counted`: the pieces whose squares this rank adds to the norm, as counted_pieces tells."""
        self.pieces, self.params, self.config, self.counted = pieces, params, config, counted
        self.m, self.v = moments
        self.iteration = 0

    def step(self, grads: Whole, everyone: Group) -> tuple[float, float]:
        """Clips grads in place, moves the parameters -> the norm before clipping, and the learning rate used.

        `everyone` are the ranks that own the model between them.
        """
        self.iteration += 1
        norm, rate = global_norm(grads, self.counted, everyone), learning_rate(self.config, self.iteration)
        clip = clip_coefficient(norm, self.config.clip_grad)
        for piece, at in tiles(self.pieces):
            grad = grads.load(piece, at)
            if clip < 1:
                grad *= clip
            param, m, v = (buffer.load(piece, at) for buffer in (self.params, self.m, self.v))
            adam_update(param, grad, m, v, self.iteration, rate, piece.segment.tensor.decay, self.config)
            for buffer, values in ((self.params, param), (self.m, m), (self.v, v)):
                buffer.store(piece, values, at)
        return norm, rate


def tiles(pieces: list[Piece]) -> Iterator[tuple[Piece, slice]]:
    """Every piece, TILE elements at a time."""
    for piece in pieces:
        for start in range(0, piece.own.stop - piece.own.start, TILE):
            yield piece, slice(start, start + TILE)


def global_norm(grads: Whole, counted: list[Piece], everyone: Group) -> float:
    """The norm of the whole model's gradient, from what each rank owns of it."""
    squares = sum(sum_of_squares(grads.load(piece)) for piece in counted)
    return sqrt(everyone.all_reduce(np.array([squares], np.float64), "gradient norm")[0])


def counted_pieces(pieces: list[Piece], tensor_rank: int, counted_elsewhere: str) -> list[Piece]:
    """What a rank adds to the norm, so that the sum over all that own the model counts every element once.

    Of a split tensor each of t ranks has a part; a replicated one is alike on all of them, and the first one counts it.
    `counted_elsewhere` is the name of a tensor of which another pipeline rank counts its copy, or "".
    """
    return [piece for piece in pieces if piece.segment.name != counted_elsewhere
            and (piece.segment.tensor.split is not None or tensor_rank == 0)]
