"""Adam on what a rank owns of the flat buffers, with a global norm that counts every tensor once."""
from math import isfinite, sqrt

import numpy as np

from mpi_impl import kernels
from mpi_impl.comm.group import Group
from mpi_impl.parallel.buffers import Buffer
from mpi_impl.runtime.arrays import narrowed, on_device
from reference.optimizer import OptimizerConfig, clip_coefficient, learning_rate
from reference.parallel.layout import Piece

# Elements at a time: no more of an offloaded shard is on the device at the same time.
TILE = 1 << 16              # they stay in a core's cache
DEVICE_TILE = 1 << 24       # they keep a GPU busy


class Tile:
    """Some neighbouring elements that a rank owns, of whatever tensors."""

    def __init__(self, start: int, shift: int, limit: int):
        """It begins at this element of the shard, `shift` further on in the flat buffer, and is empty. It takes as many
        elements as `limit`.
        """
        self.start, self.stop, self.shift, self.end = start, start, shift, start + limit
        self.runs: list[tuple[slice, bool]] = []    # its elements, and whether their tensors have weight decay

    def has_room(self, start: int, shift: int) -> bool:
        """Whether what begins here is its neighbour, and some of that can join it."""
        return (self.stop, self.shift) == (start, shift) and self.stop < self.end

    def take(self, stop: int, decay: bool) -> int:
        """Take what comes next, up to `stop` or until the tile is full -> where it now ends."""
        first, self.stop = self.stop, min(stop, self.end)
        if self.runs and self.runs[-1][1] == decay:
            first = self.runs.pop()[0].start + self.start
        self.runs.append((slice(first - self.start, self.stop - self.start), decay))
        return self.stop

    @property
    def place(self) -> Piece:
        """For a Buffer."""
        return Piece(None, slice(self.start + self.shift, self.stop + self.shift), slice(self.start, self.stop))


class Adam:
    """Moves master weights along gradients, by the formulas of reference/optimizer.py, tile by tile."""

    def __init__(self, pieces: list[Piece], model: Buffer, states: dict[str, Buffer], config: OptimizerConfig,
                 counted: list[Piece]):
        """`states` are the master weights, "parameters", and the moments, "m" and "v". `model` has the parameters that
        the model computes with: the master weights themselves, or a copy in another format.

        `counted`: the pieces whose squares this rank adds to the norm, as counted_pieces tells.
        """
        self.tiles, self.model, self.states = tiles(pieces, model.flat), model, states
        self.config, self.counted = config, counted
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
        for tile in self.tiles:
            place = tile.place
            states, model = [buffer.load(place) for buffer in self.states.values()], self.model_part(place)
            kernels.adam_update(states, grads.load(place), model, tile.runs, factor, self.iteration, rate, self.config)
            for buffer, values in zip(self.states.values(), states):
                buffer.store(place, values)
            if model is not None:
                self.model.store(place, model)
        return norm, rate

    def model_part(self, place: Piece):
        """The model's own copy of some parameters, in its own format; None if it has the master weights."""
        return None if self.model is self.states["parameters"] else self.model.load(place)

    def take_over(self) -> None:
        """The master weights have got new values: the model gets them, too."""
        if self.model is not self.states["parameters"]:
            for tile in self.tiles:
                master = self.states["parameters"].load(tile.place)
                self.model.store(tile.place, narrowed(master, self.model.flat.dtype))


def tiles(pieces: list[Piece], device_prototype) -> list[Tile]:
    """All elements of the pieces, which stand in the order of the shard. Small tensors join their neighbours: one by
    one, they would cost more in calls than in arithmetic. What computes is where `device_prototype` is.
    """
    limit, found = DEVICE_TILE if on_device(device_prototype) else TILE, list[Tile]()
    for of, in_buffer, in_shard in pieces:
        start, shift = in_shard.start, in_buffer.start - in_shard.start
        while start < in_shard.stop:
            if not found or not found[-1].has_room(start, shift):
                found.append(Tile(start, shift, limit))
            start = found[-1].take(in_shard.stop, of.tensor.decay)
    return found


def global_norm(grads: Buffer, counted: list[Piece], everyone: Group) -> float:
    """The norm of the whole model's gradient, from what each rank owns of it."""
    squares = sum((kernels.sum_of_squares(grads.load(tile.place)) for tile in tiles(counted, grads.flat)),
                  np.zeros((), np.float64, like=grads.flat)).item()
    return sqrt(everyone.all_reduce(np.array([squares], np.float64), "gradient norm")[0])


def counted_pieces(pieces: list[Piece], tensor_rank: int, tied_copy: str) -> list[Piece]:
    """What a rank adds to the norm, so that the sum over all that own the model counts every element once.

    Of a split tensor each of t ranks has a part; a replicated one is alike on all of them, and the first one counts it.
    `tied_copy` is the name of a tensor of which another pipeline rank counts its copy, or "".
    """
    return [piece for piece in pieces if piece.of.name != tied_copy
            and (piece.of.tensor.split is not None or tensor_rank == 0)]
