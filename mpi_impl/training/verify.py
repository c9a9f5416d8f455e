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

How far rounding grows depends on the step: at a high rate a right run exceeds any tolerance. So where a step exceeds
it, the textbook measures how far its own results move if every weight is off by one rounding, and ranks may differ by
some times that. In other formats than float64 the ranks and the textbook first repeat the step in float64, from the
ranks' weights and moments: if they differ there, the ranks compute another model. (With experts float64 alone is
judged, since rounding can send a token to another expert.)

Why the textbook then takes over the ranks' weights: every step is proven from the same weights, so the whole run is.
Left alone the two would part, and nothing would be wrong: training at a high rate is chaotic, and has been seen to
make a difference of 1e-7 in a gradient one of 0.3 within a hundred steps (and 1e-15 one of 1e-9).
"""
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from math import isfinite, sqrt
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.comm.topology import place
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.replicas import join_replicas
from mpi_impl.runtime.arrays import to_host
from mpi_impl.training.trainer import StepResult, Trainer
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.stages import layouts_of_ranks
from reference.params import assign, leaves, tree_map
from reference.precision import FORMATS, Precision
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

    def __str__(self) -> str:
        return " ".join(f"{name} {value:.0e}" for name, value in self._asdict().items())


class Outcome(NamedTuple):
    """The results of a step, with whole trees of gradients and weights."""

    loss: float
    norm: float
    grads: Any
    params: Any


# What the formats explain, with room: rounding is 1e-16 and 6e-8, and sums run over thousands of terms.
# In 16 bits they are epsilon, 2^-10 and 2^-7, times 1 and 32; a first step of Adam knows little but a gradient's sign.
TOLERANCE = {"float64": StepDifference(1e-12, 1e-10, 1e-8), "float32": StepDifference(1e-5, 1e-4, 2e-3),
             "float16": StepDifference(1e-3, 3e-2, 0.5), "bfloat16": StepDifference(8e-3, 0.25, 1.0)}
EXACT = "float64"
MARGIN = 1000       # times the effect of rounding the weights once: the most that rounding everywhere explains


class Verifier:
    """Holds the textbook's run on rank 0 of the world. Its methods are called by all ranks together."""

    def __init__(self, trainer: Trainer, optimizer: OptimizerConfig, seed: int):
        self.trainer, self.world, self.optimizer = trainer, trainer.topology.world, optimizer
        self.precision = trainer.state.precision
        self.worst = self.effect = StepDifference(0.0, 0.0, 0.0)        # differences, and effects of rounding
        self.repetition: Verifier | None = None     # in float64, of steps that exceed the tolerance
        self.repeated = 0
        if self.world.rank == 0:
            self.layouts = layouts_of_ranks(trainer.state.model, trainer.topology.config)
            self.textbook = training.Trainer(trainer.state.model, optimizer, seed, self.precision)

    def begin(self, microbatches: Sequence, global_batch_size: int) -> None:
        """Keep copies of what the next step begins with, so that it can be repeated."""
        trainer, state = self.trainer, self.trainer.state
        self.arguments, self.counters = (microbatches, global_batch_size), (trainer.iteration,
                                                                            trainer.optimizer.iteration)
        self.states = {name: [(piece, buffer.load(piece).copy()) for piece in state.pieces_in(buffer, state.pieces)]
                       for name, buffer in state.optimizer_states.items()}
        if self.world.rank == 0:
            self.earlier = in_format(self.textbook, self.precision.main)

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

        Raises UserError, on all ranks, if they differ by more than the tolerance, and rounding does not explain it.
        """
        found, tolerance = self.measure(batch, result), TOLERANCE[self.precision.compute]
        if exceeded(found, tolerance):
            self.require_rounding(batch, found, result.learning_rate)
            self.take_over()        # of the moments, too, which remember that rounding
            self.repeated += 1
        else:
            self.worst = StepDifference(*map(max, self.worst, found))
        return f"off by at most {self.worst}"

    def measure(self, batch, result: StepResult) -> StepDifference:
        """Compare the ranks' step with the textbook's. Raises UserError, on all ranks, if it is not finite."""
        with self.world.ledger.phase("verification"):
            grads, params = (self.of_all_ranks(self.trainer.state.whole(buffer), reason) for buffer, reason in (
                (self.trainer.state.gradients.own, "gradients of all ranks"),
                (self.trainer.state.optimizer_states["parameters"], "weights of all ranks")))
        found = self.world.broadcast_object(lambda: self.compare(batch, result, grads, params),
                                            "the textbook's step")
        if not all(map(isfinite, found)):
            raise UserError(f"--verify: iteration {self.trainer.iteration} cannot be compared, for the run has "
                            "diverged. Try a smaller --lr.")
        return found

    def require_rounding(self, batch, found: StepDifference, rate: float) -> None:
        """Raise UserError, on all ranks, unless rounding explains the difference."""
        if self.precision.compute == EXACT:
            self.require(found, self.rounding(self, batch, rate), "The ranks do not compute the same model.")
            return
        again = self.repeat()
        again.require(again.measure(batch, again.trainer.step(*self.arguments)), self.rounding(again, batch, rate),
                      "The ranks do not compute the same model.")
        if self.trainer.state.model.experts is None:
            self.require(found, self.rounding(self, batch, rate), "In float64 they agree: a kernel or a sum in "
                         f"{self.precision.compute} is wrong, or the moments were before this iteration.")

    def rounding(self, verifier: "Verifier", batch, rate: float) -> StepDifference:
        """Return the effect of rounding to a verifier's format: in the format of its sums, scaled to its own."""
        main, form = FORMATS[verifier.precision.main], verifier.precision.form

        def effect() -> StepDifference:
            runs = [in_format(self.earlier, main.name, epsilon) for epsilon in (0, main.epsilon, -main.epsilon)]
            whole, *moved = (step_of(run, batch) for run in runs)
            found = StepDifference(*map(max, *(verifier.apart(one, whole, rate) for one in moved)))
            found = found._replace(loss=max(found.loss, found.gradient / 10))       # one number can be right by chance
            return StepDifference(*(value * form.epsilon / main.epsilon for value in found))

        effect_now = self.world.broadcast_object(effect, "the effect of rounding")
        verifier.effect = StepDifference(*map(max, verifier.effect, effect_now))
        return verifier.effect

    def repeat(self) -> "Verifier":
        """Return a verifier in float64, with the ranks' states before the step, and the same in its textbook."""
        state = self.trainer.state
        again = self.repetition = self.repetition or Verifier(
            Trainer(ModelState(state.model, state.topology, state.seed, Precision(EXACT), state.main),
                    self.optimizer), self.optimizer, state.seed)
        again.trainer.iteration, again.trainer.optimizer.iteration = self.counters
        with self.world.ledger.phase("verification"):
            for name, pieces in self.states.items():
                for piece, values in pieces:
                    again.trainer.state.optimizer_states[name].store(piece, values)
            again.trainer.state.adopt_master_weights()
        again.take_over()
        return again

    def require(self, found: StepDifference, rounding: StepDifference, verdict: str) -> None:
        """Raise UserError if a difference exceeds both the tolerance and what rounding explains."""
        allowed = StepDifference(*map(max, TOLERANCE[self.precision.compute], (MARGIN * value for value in rounding)))
        for name in exceeded(found, allowed):
            raise UserError(f"--verify: the {name} of iteration {self.trainer.iteration} and that of one process "
                            f"differ by {getattr(found, name):.1e}, but {getattr(allowed, name):.0e} is allowed in "
                            f"{self.precision.compute}. {verdict}")

    def of_all_ranks(self, flat, reason: str):
        """Gather every rank's flat buffer, [ranks, size]: those of other stages may have fewer elements, and zeros."""
        flat = to_host(flat)
        size = int(self.world.all_reduce(np.array([flat.size]), "size of the largest buffer", op="max")[0])
        padded = np.zeros_like(flat, shape=(1, size))
        padded[0, :flat.size] = flat
        return self.world.all_gather(padded, 0, reason)

    def compare(self, batch, result: StepResult, grads, params) -> StepDifference:
        """Compare on rank 0: grads and params are all ranks' flat buffers, [ranks, size]; every replica must agree."""
        expected = step_of(self.textbook, batch, result.skipped)
        replicas = [Outcome(result.loss, result.grad_norm, *trees)
                    for trees in zip(self.whole(grads), self.whole(params), strict=True)]
        tree_map(assign, self.textbook.params, replicas[0].params)
        return StepDifference(*map(worst, zip(*(self.apart(replica, expected, result.learning_rate)
                                                for replica in replicas))))

    def apart(self, outcome: Outcome, expected: Outcome, rate: float) -> StepDifference:
        """Compare two outcomes of a step, each quantity relative to its own magnitude."""
        gradient = 0.0 if not isfinite(outcome.norm) else worst([
            abs(outcome.norm - expected.norm) / max(expected.norm, 1e-3),
            largest(difference(outcome.grads, expected.grads)) / max(largest(expected.grads), 1e-3)])
        # How far Adam moves a weight, with the rounding of the weight added.
        step = rate + 16 * FORMATS[self.precision.main].epsilon * largest(expected.params)
        weights = root_mean_square(difference(outcome.params, expected.params), SMALL if self.precision.half else 1)
        return StepDifference(abs(outcome.loss - expected.loss) / max(expected.loss, 1.0), gradient, weights / step)

    def whole(self, flats) -> Iterator:
        """Return each replica's whole tree, from the flat buffers of all ranks [ranks, size]."""
        parallel = self.trainer.topology.config
        by_place = {place(rank, parallel): flat for rank, flat in enumerate(flats)}
        trees = {at: self.layouts[at.pipeline].views(flat) for at, flat in by_place.items()}
        return join_replicas(trees, [layout.tensors for layout in self.layouts], parallel)

    def summary(self) -> str:
        found = ", ".join(f"{name} {worst:.1e} (allowed {allowed:.0e})" for name, worst, allowed
                          in zip(StepDifference._fields, self.worst, TOLERANCE[self.precision.compute], strict=True))
        more = f"; {self.repeated} iterations more, by rounding alone" if self.repeated else ""
        return f"verified against one process, every iteration; largest differences: {found}{more}"


def exceeded(found: StepDifference, allowed: StepDifference) -> list[str]:
    """Return the names of differences that are larger than allowed."""
    return [name for name in found._fields if not getattr(found, name) <= getattr(allowed, name)]


def step_of(textbook: training.Trainer, batch, skipped: bool = False) -> Outcome:
    """Let the textbook do a step, and return copies of the results."""
    loss, norm, grads = textbook.step(batch, skipped)
    return Outcome(loss, norm, grads, tree_map(np.copy, textbook.params))


def in_format(textbook: training.Trainer, form: str, epsilon: float = 0) -> training.Trainer:
    """Return a copy of the textbook's run that goes on in another format, from weights that an epsilon has moved."""
    other, random = copy(textbook), np.random.default_rng(0)
    other.form = FORMATS[form]
    other.params, other.m, other.v = (tree_map(lambda x: x.astype(form), tree)
                                      for tree in (textbook.params, textbook.m, textbook.v))
    other.params = tree_map(lambda x: x + (x * epsilon * random.uniform(-1, 1, x.shape)).astype(form), other.params)
    return other


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
