"""--verify: the textbook trains beside the ranks, in one process on the same batches, and must agree.

How far apart they are, always relative. The loss: the difference / the loss. The gradient: the largest difference of
an element / the largest element. The weights: of each tensor the root mean square of the differences, the worst of
them / (lr x steps so far), which is how far Adam can have moved a weight.

Why the weights are not held to the gradient's standard: the gradient of the key bias is zero, for softmax does not
feel a constant added to all scores, so what is computed for it is rounding alone. Adam divides rounding by the root
of its square and takes whole steps in directions that mean nothing. Losses and other gradients do not feel them.
"""
from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

import numpy as np

from mpi_impl.training.trainer import StepResult, Trainer
from reference import training
from reference.errors import UserError
from reference.params import join, leaves


class Difference(NamedTuple):
    """Between ranks and textbook, each relative as said above."""

    loss: float
    gradient: float
    weights: float


# What the formats explain, with room: rounding is 1e-16 and 6e-8, and sums run over thousands of terms.
TOLERANCE = {"float64": Difference(1e-10, 1e-10, 1e-8), "float32": Difference(1e-4, 1e-3, 1e-2)}


class Verifier:
    """Holds the textbook's run on rank 0 of the world. Its methods are called by all ranks together."""

    def __init__(self, trainer: Trainer, optimizer, seed: int):
        self.trainer, self.world = trainer, trainer.topology.world
        self.dtype = trainer.flat_params.dtype
        self.distance = 0.0                                        # lr x steps so far
        self.worst = Difference(0.0, 0.0, 0.0)
        if self.world.rank == 0:
            self.textbook = training.Trainer(trainer.model, optimizer, seed, self.dtype)

    def check(self, tokens, targets, result: StepResult) -> Difference:
        """After a step of the ranks: the same step in the textbook, on the whole batch, given on rank 0.

        Raises UserError, on all ranks alike, if they are further apart than the tolerance.
        """
        self.distance += result.learning_rate
        with self.world.ledger.phase("verification"):
            grads = self.world.all_gather(self.trainer.flat_grads[None], 0, "gradients of all ranks")
            params = self.world.all_gather(self.trainer.flat_params[None], 0, "weights of all ranks")
        found = self.world.from_first(lambda: self.compare(tokens, targets, result, grads, params))
        self.worst = Difference(*map(max, self.worst, found))
        limit = TOLERANCE[self.dtype.name]
        for name, difference, allowed in zip(Difference._fields, found, limit, strict=True):
            if not difference <= allowed:
                raise UserError(f"--verify: the {name} of iteration {self.trainer.optimizer.iteration} is "
                                f"{difference:.1e} away from what one process gives, but {allowed:.0e} is allowed in "
                                f"{self.dtype.name}. The ranks do not compute the same model.")
        return found

    def compare(self, tokens, targets, result: StepResult, grads, params) -> Difference:
        """On rank 0. grads and params are the flat buffers of all ranks, [ranks, size]; every replica must agree."""
        loss, _, expected = self.textbook.step(tokens, targets)
        largest = max(abs(x).max() for _, x in leaves(expected))
        return Difference(abs(result.loss - loss) / max(abs(loss), 1e-30),
                          max(abs(d).max() for d in self.differences(grads, expected)) / max(largest, 1e-30),
                          max(root_mean_square(d) for d in self.differences(params, self.textbook.params))
                          / max(self.distance, 1e-30))

    def differences(self, flats, expected) -> Iterator[np.ndarray]:
        """Of every tensor, in every replica, from the expected tree."""
        layout, t = self.trainer.layout, self.trainer.topology.tensor.size
        for first in range(0, len(flats), t):                      # tensor-parallel ranks are neighbours
            joined = join([layout.views(flat) for flat in flats[first:first + t]], layout.tensors)
            for (_, x), (_, y) in zip(leaves(joined), leaves(expected), strict=True):
                yield x - y

    def summary(self) -> str:
        limit = TOLERANCE[self.dtype.name]
        found = ", ".join(f"{name} {worst:.1e} (allowed {allowed:.0e})" for name, worst, allowed
                          in zip(Difference._fields, self.worst, limit, strict=True))
        return f"verified against one process, every iteration; largest differences: {found}"


def shown(difference: Difference) -> str:
    return "off by " + " ".join(f"{name} {value:.0e}" for name, value in difference._asdict().items())


def root_mean_square(x) -> float:
    return sqrt(float(np.vdot(x, x)) / x.size)
