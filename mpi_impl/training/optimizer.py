"""Adam on what a rank owns of the flat buffers, with a global norm that counts every tensor once."""
from collections.abc import Iterator
from math import sqrt

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.parallel.buffers import Buffer
from reference.layout import Piece
from reference.optimizer import OptimizerConfig, adam_update, clip_coefficient, learning_rate, sum_of_squares

TILE = 1 << 16      # elements at a time: they stay in the cache, and no more of a far shard is near at once


class Adam:
    """Moves parameters along gradients, by the formulas of reference/optimizer.py, piece by piece."""

    def __init__(self, pieces: list[Piece], params: Buffer, moments: tuple[Buffer, Buffer], config: OptimizerConfig,
                 counted: list[Piece]):
        """`counted`: the pieces whose squares this rank adds to the norm, as counted_pieces tells."""
        self.pieces, self.params, self.config, self.counted = pieces, params, config, counted
        self.m, self.v = moments
        self.iteration = 0

    def step(self, grads: Buffer, everyone: Group) -> tuple[float, float]:
        """Clips grads in place, moves the parameters -> the norm before clipping, and the learning rate used.

        `everyone` are the ranks that own the model between them.
        """
        self.iteration += 1
        norm, rate = global_norm(grads, self.counted, everyone), learning_rate(self.config, self.iteration)
        clip = clip_coefficient(norm, self.config.clip_grad)
        for piece in tiles(self.pieces):
            grad = grads.load(piece)
            if clip < 1:
                grad *= clip
            param, m, v = (buffer.load(piece) for buffer in (self.params, self.m, self.v))
            adam_update(param, grad, m, v, self.iteration, rate, piece.of.tensor.decay, self.config)
            for buffer, values in ((self.params, param), (self.m, m), (self.v, v)):
                buffer.store(piece, values)
        return norm, rate


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
