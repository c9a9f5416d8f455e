"""The first tensor, in the order of computation, in which two recordings of other programs differ beyond rounding.

As compare/differences.py does for our own runs: the whole is assembled from A's parts, and every part of both runs is
compared with it, also A's own, since ranks that should hold the same may not. What differs here is that nothing is
known of the model. So a gradient is compared relative to the largest of its tensor, or to a hundredth of the largest of
all: of a bias of keys it is 0, but for rounding. And weights are compared after an update relative to how far A has
moved them, where their gradient is more than rounding: Adam takes a whole step in whichever direction that points.

Rounding explains more the coarser the formats are in which a tensor and those before it are stored, and the more layers
lie before it. Each layer adds errors that do not depend on those of others, so together they grow with the square root
of the number of layers (Higham and Mary 2019). The worst case, in which all errors point in one direction, grows in
proportion to it (TTrace, arXiv 2506.09280, theorem 5.3), and would hide a mistake in a deep model.
"""
from functools import cached_property
from math import sqrt
from typing import Any

import numpy as np

from reference.errors import UserError
from reference.precision import FORMATS
from shardlab.compare.completeness import covers
from shardlab.compare.differences import (TOLERANCE, Findings, Holder, Scale, TensorDifference, assemble, farthest,
                                          magnitude, summed)
from shardlab.compare.recording import whole_shape
from shardlab.compare.their_runs.records import REVERSED, TheirKey, TheirRun, names_of

SHOWN = 6           # differences to look for
NEGLIGIBLE = 1e-2   # of the largest gradient of all: what a smaller tensor's is compared with
MEASURED = 8        # layers, forward and backward, of the models whose rounding TOLERANCE has been measured on
UNNAMED, BATCH_FIRST = ("i", "j", "k"), ("b", "s", "h")     # dimensions that nobody has named
STATES = "parameters", "optimizer parameters"       # phases of weights
WEIGHTS = "batch", *STATES                  # phases whose tensors are not computed layer after layer
ALIKE = 1e-2        # of the largest element: how exact a multiple must be, and how far its factor from 1
ROUNDING = 16       # epsilons of the largest gradient, below which a gradient is rounding
MARGIN = 4          # epsilons of the largest gradient that one may be off by; and of the largest weight, for copies

DIMS_OR_MODELS = ("the dims of one of the two are wrong, a rank computes it with a wrong shape, or the runs are of "
                  "different models or batches. (Has each run told its recorder the batch, and its axes?)")
MICRO_STEPS = ("a step of {0} has {2} of them, one of {1} {3}. Give both the same number of micro-steps (gradient "
               "accumulation), and divide the samples of each among the ranks.")


class Comparison:
    """Two runs, of which the first is taken for right where that must be decided."""

    def __init__(self, a: TheirRun, b: TheirRun, names: tuple[str, str] = ("A", "B"), unseen: str = "float64"):
        """Prepare to compare. `unseen` is the coarsest format inside of what is recorded."""
        self.a, self.b, self.names, self.unseen = a, b, names, unseen
        self.common = {key for key in a.parts.keys() & b.parts.keys() if not key.name.startswith("root ")
                       or len(a.dims.get(key, ())) == len(b.dims.get(key, ()))}      # a loss is not logits

    def findings(self) -> Findings:
        """Return the first differences. Raises UserError if the two have nothing in common."""
        if not self.common:
            raise UserError(unmatched(self.a, self.b))
        found = Findings()
        alone = (self.a.parts.keys() | self.b.parts.keys()) - self.common
        found.alone = sum(key.iteration in self.steps for key in alone)
        for key in (key for key in self.a.order if key in self.common):
            found.compared += 1
            try:
                found.note(self.difference(key))
            except UserError:
                if found.differences:
                    break       # what follows from a mistake may have another shape
                raise
            if len(found.differences) == SHOWN:
                break
        return found

    @cached_property
    def steps(self) -> list[int]:
        """Return the steps that both have."""
        return sorted({key.iteration for key in self.common})

    @property
    def formats(self) -> list[str]:
        """Return the formats of what is compared, the finest first; tokens have none."""
        found = {run.format_of(key) for run in (self.a, self.b) for key in self.common if key.phase != "batch"}
        return sorted(found, key=lambda form: FORMATS[form].epsilon)

    def weights_alone(self) -> str:
        """Name weights that only one of the runs has, or return an empty text if there is none."""
        names = [{key.name for key in run.parts if key.phase == "parameters"} for run in (self.a, self.b)]
        found = sorted(names[0] ^ names[1]) if all(names) else []
        more = f" and {len(found) - 3:,} more" if len(found) > 3 else ""
        return ", ".join(found[:3]) + more

    def pattern(self, one: TensorDifference) -> str:
        """Say what B is in terms of A: a multiple, or the same rows in another order. Return "" if it is neither."""
        assert isinstance(one.key, TheirKey)
        a, b = self.names
        expected, others = self.holders(one.key)
        whole, other = (assemble(holders, one.shape)[0] for holders in (expected, others))
        off, near = one.holders, min(one.allowed, ALIKE) * one.unit
        x, y = (np.concatenate([values.ravel() for values in of]) for of in (
            (whole[holder.box] for holder in off), (holder.values for holder in off)))
        with np.errstate(invalid="ignore"):     # of infinities
            factor = np.vdot(x, y) / (np.vdot(x, x) or 1)
            if {holder.run for holder in off} == {b} and abs(factor - 1) > ALIKE and (
                    abs(y - factor * x).max() <= near * abs(factor)):
                return f"{b} is {factor:.4g} times {a}, {'everywhere' if len(off) == len(others) else 'on these ranks'}"
            for axis in range(whole.ndim):
                x, y = (sorted_rows(np.moveaxis(array, axis, 0)) for array in (whole, other))
                if abs(x - y).max(initial=0) <= near:
                    return f"{b} has the same rows in another order, along axis {axis}"
        return ""

    # ---- one tensor ----

    def difference(self, key: TheirKey) -> TensorDifference:
        """Return the largest difference of a tensor's holders to A's whole; or of a run's copies of a weight, which are
        updated by the same gradient, so that even what rounding explains between two runs is a mistake between them.
        """
        expected, others = self.holders(key)
        shapes = [whole_shape(holders) for holders in (expected, others)]
        if shapes[0] != shapes[1]:
            in_a, in_b = (f"{list(shape)} in {name}" for shape, name in zip(shapes, self.names))
            calls = [sum(one._replace(call=key.call) == key for one in run.parts) for run in (self.a, self.b)]
            why = DIMS_OR_MODELS if calls[0] == calls[1] else MICRO_STEPS.format(*self.names, *calls)
            raise UserError(f"{key} is {in_a}, but {in_b}, when its ranks' parts are put together: {why}")
        whole, there = assemble(expected, shapes[0])
        counted = there & self.is_no_rounding(key, whole.shape)
        if key.phase in STATES:
            epsilons = (MARGIN * FORMATS[run.format_of(key)].epsilon for run in (self.a, self.b))
            for holders, few in zip((expected, others), epsilons):
                drift = farthest(key, holders, holders, assemble(holders, shapes[0])[0], counted,
                                 Scale(magnitude(whole), "the largest element", few))
                if drift.beyond_rounding:
                    return drift
        return farthest(key, [*expected, *others], expected, whole, counted, self.scale(key, whole))

    def holders(self, key: TheirKey) -> tuple[list[Holder], list[Holder]]:
        """Return the holders in A and in B, with the dimensions in A's order. Raises UserError if parts are missing."""
        expected, others = (holders_of(name, run, key) for name, run in zip(self.names, (self.a, self.b)))
        return expected, transposed(others, *(run.dims.get(key, ()) for run in (self.b, self.a)))

    def scale(self, key: TheirKey, whole: Any) -> Scale:
        (form, depth), largest = self.roundings[key], magnitude(whole)
        tolerance, growth = TOLERANCE[form], sqrt((1 + depth) / (1 + MEASURED))
        allowed = tolerance.first * growth if key.iteration == self.a.first_step else tolerance.later * max(1, growth)
        if key.phase == "batch":
            return Scale(largest, "the largest element", FORMATS["float64"].epsilon)      # tokens, and masks
        if key.phase == "optimizer parameters":
            before = key._replace(phase="parameters")
            moved = magnitude(whole - self.whole(before)) if before in self.a.parts else largest
            rounding = 2 * FORMATS[coarsest(*(run.format_of(key) for run in (self.a, self.b)))].epsilon * largest
            unit = max(moved, rounding)     # a step may be smaller than the last digit of a weight
            return Scale(unit, "the largest step of a weight", tolerance.weights + (rounding / unit if unit else 0))
        if key.phase == "parameters" and key.iteration > self.a.first_step:
            return Scale(largest, "the largest element", tolerance.later)
        if key.phase == "gradients":
            least = NEGLIGIBLE * self.largest_gradients[key.iteration]
            return Scale(max(largest, least), "the largest gradient", allowed)
        return Scale(largest, "the largest element", allowed)

    def is_no_rounding(self, key: TheirKey, shape: tuple[int, ...]) -> Any:
        """Return which weights no update has moved by a gradient that is rounding alone: bool [shape]."""
        found = np.ones(shape, bool)
        if key.phase not in STATES:
            return found
        steps = range(self.a.first_step, key.iteration + (key.phase != "parameters"))
        for gradient in (key._replace(iteration=step, phase="gradients") for step in steps):
            if gradient in self.a.parts:
                found &= abs(self.whole(gradient)) > self.rounding(key, len(steps)) * self.largest_gradients[
                    gradient.iteration]
        return found

    def rounding(self, key: TheirKey, updates: int) -> float:
        """Return how large a gradient is, of the largest one, that does not show rounding in a weight.

        Adam's first update has only a gradient's sign, the later ones have the ratios of several gradients.
        """
        form, _ = self.roundings[key]
        epsilon = FORMATS[form].epsilon
        return max(ROUNDING * epsilon, (updates > 1) * MARGIN * epsilon / TOLERANCE[form].weights)

    @cached_property
    def roundings(self) -> dict[TheirKey, tuple[str, int]]:
        """Return for each of A's tensors the coarsest format until then, and how many layers its errors have passed."""
        found, layers = {}, 1 + max((key.layer for key in self.a.order if key.layer is not None), default=-1)
        form, depth, step = self.unseen, 0, self.a.first_step
        for key in self.a.order:
            if key.iteration != step:
                depth, step = 0, key.iteration
            backward = key.phase in REVERSED
            if key.phase not in WEIGHTS and key.layer is not None:
                depth = 2 * layers - key.layer if backward else key.layer + 1
            form = coarsest(form, *(run.format_of(key) for run in (self.a, self.b) if key in run.parts))
            found[key] = form, depth
        return found

    @cached_property
    def largest_gradients(self) -> dict[int, float]:
        """Return the largest gradient of a weight in A, by step."""
        found: dict[int, float] = {}
        for key in self.a.parts:
            if key.phase == "gradients":
                found[key.iteration] = max(found.get(key.iteration, 0), magnitude(self.whole(key)))
        return found

    def whole(self, key: TheirKey) -> Any:
        return whole_of("A", self.a, key)


def whole_of(run: str, recording: TheirRun, key: TheirKey) -> Any:
    """Put a whole tensor together. Raises UserError if parts are missing."""
    holders = holders_of(run, recording, key)
    return assemble(holders, whole_shape(holders))[0]


def coarsest(*formats: str) -> str:
    return max(formats, key=lambda form: FORMATS[form].epsilon)


def holders_of(run: str, recording: TheirRun, key: TheirKey) -> list[Holder]:
    """Return every holder of a part; for partial sums, all ranks as one. Raises UserError if parts are missing."""
    held = recording.parts[key]
    parts = [part for part, _ in held]
    shape = whole_shape(parts)
    if not covers(parts, shape):
        raise UserError(f"{run} lacks a part of {key}: by its dims the ranks' parts do not make the whole, "
                        f"{list(shape)}.")
    holders = [Holder(run, (part.rank,) if recording.has_ranks else (), part.box, recording.load(stored))
               for part, stored in held]
    return summed(run, parts, holders)


def sorted_rows(x: Any) -> Any:
    """Return the rows of x in an order that depends on them alone."""
    rows = x.reshape(len(x), -1)
    return rows[np.argsort(rows @ np.random.default_rng(0).normal(size=rows.shape[1]))]


def transposed(holders: list[Holder], dims: tuple[str, ...], wanted: tuple[str, ...]) -> list[Holder]:
    """Transpose a tensor whose dimensions have the same names in another order; the recorder's own are [b, s, h]."""
    dims, wanted = (BATCH_FIRST if names == UNNAMED else names for names in (dims, wanted))
    if dims == wanted or sorted(dims) != sorted(wanted):
        return holders
    order = [dims.index(name) for name in wanted]
    return [holder._replace(box=tuple(holder.box[i] for i in order), values=holder.values.transpose(order))
            for holder in holders]


def unmatched(a: TheirRun, b: TheirRun) -> str:
    """Say that no tensor has the same name in both, with names of each."""
    some = [", ".join(sorted(names_of(run))[:4]) for run in (a, b)]
    return (f"A and B have no tensor of one name: A has {some[0]}, ...; B has {some[1]}, .... Give two of models whose "
            "modules have the same names.")
