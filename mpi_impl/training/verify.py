"""--verify: the textbook trains along with the ranks, in one process on the same batches, and must agree at every step.

How far apart they are, relative to their magnitude. The loss: the difference / the loss (or 1, if the loss is
below 1: logits are of order 1 however small it gets). The gradient: the largest difference of an element / the largest
element (or 0.001, likewise), or that of the norms / the norm if it is larger. The weights: of each tensor the root mean
square of the differences, the worst of them / the learning rate, which is about how far Adam moves a weight (plus
what a weight is rounded to).

What adds a constant to all scores is left out of the weights: the bias of keys, and that of their norm. Its gradient is
zero, for softmax does not feel it, so what is computed for it is rounding alone. Adam divides rounding by the root of
its square and takes whole steps in directions that mean nothing, and that no loss feels. (Rope rotates these biases, so
that they have a small gradient; they are left out there, too.) Elsewhere the same happens to single elements, so in
float32 the weights are a coarse check: float64 is the strict one.

Why the textbook then takes over the ranks' weights: every step is proven from the same weights, so the whole run is.
Left alone the two would part, and nothing would be wrong: training at a high rate is chaotic, and has been seen to
make a difference of 1e-7 in a gradient one of 0.3 within a hundred steps (and 1e-15 one of 1e-9).
"""
from collections.abc import Iterable, Iterator
from math import isfinite, sqrt
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.topology import place
from mpi_impl.parallel.replicas import join_replicas
from mpi_impl.runtime.arrays import to_host
from mpi_impl.training.trainer import StepResult, Trainer
from reference.errors import UserError
from reference.parallel.stages import layouts_of_ranks
from reference.params import assign, leaves, tree_map
from reference.precision import FORMATS
from reference.training import trainer as training

# Parameters that add the same to all scores of a softmax, and their rows that do.
INERT = {"attention.b_qkv": slice(1, 2), "attention.b_kv": slice(0, 1),         # [3, a, d]: q, k, v; [2, g, d]: k, v
         "attention.k_norm.bias": slice(None), "multichoice_head.b": slice(None),
         "span_head.b": slice(None)}
SMALL = 256     # elements: in smaller tensors one sign flip dominates, in 16 bits


class StepDifference(NamedTuple):
    """Between ranks and textbook, each relative as said above."""

    loss: float
    gradient: float
    weights: float


# What the formats explain, with room: rounding is 1e-16 and 6e-8, and sums run over thousands of terms.
# In 16 bits they are epsilon, 2^-10 and 2^-7, times 1 and 32; a first step of Adam knows little but a gradient's sign.
TOLERANCE = {"float64": StepDifference(1e-12, 1e-10, 1e-8), "float32": StepDifference(1e-5, 1e-4, 2e-3),
             "float16": StepDifference(1e-3, 3e-2, 0.5), "bfloat16": StepDifference(8e-3, 0.25, 1.0)}


class Verifier:
    """Holds the textbook's run on rank 0 of the world. Its methods are called by all ranks together."""

    def __init__(self, trainer: Trainer, optimizer, seed: int):
        self.trainer, self.world = trainer, trainer.topology.world
        self.precision = trainer.state.precision
        self.worst = StepDifference(0.0, 0.0, 0.0)
        if self.world.rank == 0:
            self.layouts = layouts_of_ranks(trainer.state.model, trainer.topology.config)
            self.textbook = training.Trainer(trainer.state.model, optimizer, seed, self.precision)

    def take_over(self) -> None:
        """Let the textbook begin with what the ranks have loaded."""
        with self.world.ledger.phase("verification"):
            flats = {name: self.of_all_ranks(self.trainer.state.whole(buffer), "states of all ranks")
                     for name, buffer in self.trainer.state.optimizer_states.items()}
        if self.world.rank == 0:
            mine = {"parameters": self.textbook.params, "m": self.textbook.m, "v": self.textbook.v}
            for name, tree in mine.items():
                tree_map(assign, tree, next(self.whole(flats[name])))
            self.textbook.iteration, self.textbook.updates = self.trainer.iteration, self.trainer.optimizer.iteration

    def check(self, batch, result: StepResult) -> str:
        """Repeat the ranks' step in the textbook, on the whole global batch, which rank 0 gives.

        -> the largest differences so far, for a person.

        Raises UserError, on all ranks, if they are further apart than the tolerance.
        """
        with self.world.ledger.phase("verification"):
            grads, params = (self.of_all_ranks(self.trainer.state.whole(buffer), reason) for buffer, reason in (
                (self.trainer.state.gradients.own, "gradients of all ranks"),
                (self.trainer.state.optimizer_states["parameters"], "weights of all ranks")))
        found = self.world.broadcast_object(lambda: self.compare(batch, result, grads, params),
                                            "the textbook's step")
        self.worst = StepDifference(*map(max, self.worst, found))
        for name, difference, allowed in zip(found._fields, found, TOLERANCE[self.precision.compute], strict=True):
            if not isfinite(difference):
                raise UserError(f"--verify: the {name} of iteration {self.trainer.iteration} cannot be compared, for "
                                "the run has diverged. Try a smaller --lr.")
            if not difference <= allowed:
                raise UserError(f"--verify: the {name} of iteration {self.trainer.iteration} and that of one "
                                f"process differ by {difference:.1e}, but {allowed:.0e} is allowed in "
                                f"{self.precision.compute}. The ranks do not compute the same model.")
        return "off by at most " + " ".join(f"{name} {value:.0e}" for name, value in self.worst._asdict().items())

    def of_all_ranks(self, flat, reason: str):
        """Gather every rank's flat buffer, [ranks, size]: those of other stages may have fewer elements, and zeros."""
        flat = to_host(flat)
        size = int(self.world.all_reduce(np.array([flat.size]), "size of the largest buffer", op="max")[0])
        padded = np.zeros_like(flat, shape=(1, size))
        padded[0, :flat.size] = flat
        return self.world.all_gather(padded, 0, reason)

    def compare(self, batch, result: StepResult, grads, params) -> StepDifference:
        """Compare on rank 0: grads and params are all ranks' flat buffers, [ranks, size]; every replica must agree."""
        loss, norm, expected = self.textbook.step(batch, result.skipped)
        replicas = list(self.whole(params))
        found = StepDifference(loss=abs(result.loss - loss) / max(loss, 1.0),
                           gradient=0.0 if result.skipped else worst([
                               abs(result.grad_norm - norm) / max(norm, 1e-3),
                               *(largest(difference(grad, expected)) / max(largest(expected), 1e-3)
                                 for grad in self.whole(grads))]),
                           weights=worst(map(self.weights_apart, replicas)) / self.step_size(result))
        tree_map(assign, self.textbook.params, replicas[0])
        return found

    def weights_apart(self, replica) -> float:
        return root_mean_square(difference(replica, self.textbook.params), SMALL if self.precision.half else 1)

    def step_size(self, result: StepResult) -> float:
        """Estimate how far Adam moves a weight, with the rounding of the weight added."""
        return result.learning_rate + 16 * FORMATS[self.precision.main].epsilon * largest(self.textbook.params)

    def whole(self, flats) -> Iterator:
        """Return each replica's whole tree, from the flat buffers of all ranks [ranks, size]."""
        parallel = self.trainer.topology.config
        by_place = {place(rank, parallel): flat for rank, flat in enumerate(flats)}
        trees = {at: self.layouts[at.pipeline].views(flat) for at, flat in by_place.items()}
        return join_replicas(trees, [layout.tensors for layout in self.layouts], parallel)

    def summary(self) -> str:
        found = ", ".join(f"{name} {worst:.1e} (allowed {allowed:.0e})" for name, worst, allowed
                          in zip(StepDifference._fields, self.worst, TOLERANCE[self.precision.compute], strict=True))
        return f"verified against one process, every iteration; largest differences: {found}"


def difference(tree, expected):
    """Return the difference of two trees, tensor by tensor."""
    return tree_map(np.subtract, tree, expected)


def largest(tree) -> float:
    """Return the largest element of a tree, signs aside."""
    return worst(abs(x).max() for _, x in leaves(tree))


def root_mean_square(tree, least: int) -> float:
    """Return that of the tensor where it is largest, without inert rows; tensors count as having `least` elements."""
    parts = [x if (rows := inert_rows(name)) is None else np.delete(x, rows, 0) for name, x in leaves(tree)]
    return worst(sqrt(float(np.vdot(x, x)) / max(x.size, least)) for x in parts)


def inert_rows(name: str) -> slice | None:
    """Return the rows of a parameter whose gradient is rounding alone, if there are any."""
    return next((rows for ending, rows in INERT.items() if name.endswith(ending)), None)


def worst(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if one is NaN: Python's max() passes over a NaN that comes after a number."""
    return float(np.max(list(values)))
