"""The first tensor, in the order of computation, in which two recordings differ beyond rounding.

Each whole tensor is assembled from the parts of run A, and every part of both runs is compared with it: also those of
A, since ranks that should hold the same may not. Partial sums are compared as their sum. A backward's recomputed
tensors must equal the forward's.

A difference is the largest of an element, relative to the tensor's largest element. For weights that Adam has moved it
is the root mean square, relative to the learning rate, since Adam moves a weight by about that much. Adam takes a whole
step in some direction even where a gradient is only rounding. For that reason the comparison ignores the key bias, and
the common part of all keys of a head: softmax ignores a constant added to all scores (see training/verify.py; with rope
it does not, and both are compared). It also ignores the bias of a choice, which is added to all answers' scores. And
tensors that are computed with moved weights are compared less strictly.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from math import sqrt
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpi_impl.training.verify import inert_rows
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from reference.precision import FORMATS, Precision
from shardlab.compare.names import FROM_THE_LOSS, Key
from shardlab.compare.recording import COMMON, Recording, TensorPart, whole_shape


class Tolerance(NamedTuple):
    """The differences that a format explains, with a margin."""

    first: float      # until the first update: sums have thousands of terms
    weights: float    # moved weights
    later: float      # tensors that are computed with them


# Models of 4 layers show a tenth of it, or less.
TOLERANCE = {"float64": Tolerance(1e-12, 1e-8, 1e-10), "float32": Tolerance(1e-4, 2e-3, 2e-3),
             "float16": Tolerance(2e-2, 0.4, 0.2), "bfloat16": Tolerance(0.1, 0.7, 0.4)}
SHOWN = 6       # differences to look for: the first, and a few that follow from it


class Holder(NamedTuple):
    """The source of values of a tensor: a rank for a part, several ranks for their sum, or no rank but the textbook."""

    run: str                   # "A" or "B"
    ranks: tuple[int, ...]
    box: tuple[slice, ...]
    values: Any

    def __str__(self):
        ranks = ", ".join(map(str, self.ranks))
        where = f", rank {ranks}" if len(self.ranks) == 1 else f", sum over ranks {ranks}" if self.ranks else ""
        return self.run + where


class TensorKey(Protocol):
    """A tensor of a run: a Key, or that of another program's."""

    @property
    def iteration(self) -> int: ...

    @property
    def phase(self) -> str: ...

    @property
    def layer(self) -> int | None: ...


class Scale(NamedTuple):
    """The unit of a tensor's differences, and how many of it are allowed."""

    unit: float
    unit_is: str
    allowed: float


class TensorDifference(NamedTuple):
    """The largest difference of one tensor between the two runs."""

    key: TensorKey
    holders: list[Holder]         # the holders that differ from run A (or from the first holder), the worst first
    size: float
    unit: float                   # the unit of the size,
    unit_is: str                  # in words
    allowed: float                # relative to it
    at: tuple[int, ...]           # coordinates, in the whole, of the element that differs most
    shape: tuple[int, ...]        # of the whole
    expected: Holder
    values: tuple[float, float]   # of that element, expected and found

    @property
    def relative(self) -> float:
        return self.size / self.unit if self.unit else np.inf if self.size else 0.0

    @property
    def strain(self) -> float:
        """Return the size as a fraction of the tolerance."""
        return self.relative / self.allowed

    @property
    def beyond_rounding(self) -> bool:
        return self.strain > 1


@dataclass
class Findings:
    """The result of a comparison of two recordings."""

    differences: list[TensorDifference] = field(default_factory=list)    # beyond rounding, the first few, in order
    compared: int = 0                # tensors
    alone: int = 0                   # tensors of one run, compared only between its own ranks
    worst: TensorDifference | None = None  # among those that agree, the one nearest to its tolerance
    before: int = 0                  # tensors that agree before the first that differs,
    last: TensorKey | None = None    # and the last of them

    def note(self, difference: TensorDifference) -> None:
        """Note a tensor's largest difference, the next in the order of computation."""
        if difference.beyond_rounding:
            self.differences.append(difference)
        elif not self.differences:
            self.before, self.last = self.before + 1, difference.key
            if self.worst is None or difference.strain > self.worst.strain:
                self.worst = difference


def compare(a: Recording, b: Recording, shown: int = SHOWN) -> Findings:
    """Compare two recordings, up to the first `shown` differences.

    Raises UserError if the two are of different models, batches or seeds, or if they agree as far as they are finite.
    """
    check_comparable(a, b)
    found, silent = Findings(), skipped_steps(a, b)
    # The first iteration that only one run has skipped: after it their weights differ.
    parted = min((iteration for iteration, where in silent.items() if len(where) == 1), default=np.inf)
    for key in sorted(a.parts.keys() | b.parts.keys(), key=lambda key: key.order):
        if key.iteration in silent and (key.phase in FROM_THE_LOSS or key.name == "gradient norm"):
            continue
        if (key.iteration, key.phase.startswith("optimizer")) > (parted, False):
            break
        in_both = all(keys_in(key, recording) for recording in (a, b))
        found.compared += in_both
        found.alone += not in_both
        difference = largest_difference(key, a, b)
        if difference is None or not (in_both or difference.beyond_rounding):
            continue        # what only one run has is right if its ranks agree, or nobody knows
        found.note(difference)
        if len(found.differences) == shown:
            break
    if silent and not found.differences:
        first = min(silent)
        if any(recording.about.format == "float16" for recording in silent[first]):
            raise UserError(f"A and B agree until the gradients of iteration {first}, which overflow float16 and say "
                            "nothing. Run both again with a smaller loss scale: give --loss-scale 1024 with --fp16.")
        raise UserError(f"A and B agree until the gradients of iteration {first}, which are not finite in either: the "
                        "run diverges on both topologies. Give both a smaller --lr.")
    return found


def skipped_steps(a: Recording, b: Recording) -> dict[int, list[Recording]]:
    """Return the iterations without useful gradients, and the runs where they are not finite.

    Those are both runs, or the one in float16, if the other has another format.
    """
    silent = {}
    narrow = [one for one in (a, b) if one.about.format == "float16"]
    for key in a.parts.keys() & b.parts.keys():
        if key.name == "gradient norm":
            bad = [one for one in (a, b) if not np.isfinite(one.load(one.parts[key][0])).all()]
            if len(bad) == 2 or (len(narrow) == 1 and bad == narrow):
                silent[key.iteration] = bad
    return silent


def check_comparable(a: Recording, b: Recording) -> None:
    """Raise UserError for two runs that are not the same on two topologies."""
    check_no_capacity(a, b)
    for name in COMMON:
        one, other = (same_computation(getattr(run.about, name)) for run in (a, b))
        if one == other:
            continue
        name = name.replace("_", " ")
        while is_dataclass(one) and is_dataclass(other):
            part = next(part for part, value in vars(one).items() if value != getattr(other, part))
            name, one, other = f"{name}'s {part}".replace("s's", "s'"), getattr(one, part), getattr(other, part)
        raise UserError(f"A and B are not the same run on two topologies: the {name} is {one} in A, but {other} in B. "
                        "Give both the same model, optimizer, data, seed and batch; ranks and how they share the work "
                        "may differ, and so may the format.")


def same_computation(facts: Any) -> Any:
    """Return an optimizer's facts without the choice of who computes what; any other facts as they are."""
    return replace(facts, muon_tp_mode="distributed") if isinstance(facts, OptimizerConfig) else facts


def check_no_capacity(a: Recording, b: Recording) -> None:
    """Raise UserError for experts that drop tokens, on two topologies."""
    for name, run in (("A", a), ("B", b)):
        experts = run.about.model.experts
        if experts and experts.moe_expert_capacity_factor is not None and a.about.parallel != b.about.parallel:
            raise UserError(f"Run {name} has --moe-expert-capacity-factor: its experts drop tokens by their number in "
                            "a microbatch on a rank, and on another topology they drop others. A and B would be two "
                            "different runs. Leave the option out of both.")


# ---- one tensor -----------------------------------------------------------------------------------------------------


def largest_difference(key: Key, a: Recording, b: Recording) -> TensorDifference | None:
    """Return the largest difference between a tensor's holders and its expected values; None if there is only one."""
    holders = [*holders_of("A", a, key), *holders_of("B", b, key)]
    expected = [holder for one in keys_in(key, a)[:1] for holder in holders_of("A", a, one)] or holders
    if expected is holders and len(holders) < 2:
        return None
    whole, there = assemble(expected, whole_shape([*holders, *expected]))
    largest, allowed, rate = magnitude(whole[there]), tolerance(key, a, b), a.about.optimizer.lr
    if is_moved_weight(key, a) and rate > 0:
        allowed += max(epsilon(key, recording) for recording in (a, b)) * largest / rate
        return farthest(key, holders, expected, whole, there, Scale(rate, "the learning rate", allowed),
                        lambda apart: sqrt(np.vdot(apart, apart) / whole.size))
    return farthest(key, holders, expected, whole, there, Scale(largest, "the largest element", allowed))


def farthest(key: TensorKey, holders: list[Holder], expected: list[Holder], whole: Any, counted: Any, scale: Scale,
             size_of: Callable[[Any], float] = lambda apart: apart.max(initial=0)) -> TensorDifference:
    """Return the largest difference of holders to the whole of the `expected` ones, among the elements that are
    counted. `size_of` measures the differences of one holder.
    """
    apart = [np.where(counted[one.box], distance(one.values, whole[one.box]), 0) for one in holders]
    sizes = [float(size_of(one)) for one in apart]
    worst = int(np.argmax(sizes))
    off = [i for i in np.argsort(sizes)[::-1] if sizes[i] > scale.allowed * scale.unit]
    inside = np.unravel_index(int(apart[worst].argmax()), apart[worst].shape)
    at = tuple(int(i) + along.start for i, along in zip(inside, holders[worst].box))
    right = next((one for one in expected if contains(one.box, at)), expected[0])
    return TensorDifference(key, [holders[i] for i in off] or [holders[worst]], sizes[worst], *scale, at,
                            whole.shape, right, (float(whole[at]), float(holders[worst].values[inside])))


def keys_in(key: Key, recording: Recording) -> list[Key]:
    """Return the keys of a tensor in a run: a recomputed one has two, the forward's first."""
    phases = ("forward", "recompute") if key.phase in ("forward", "recompute") else (key.phase,)
    return [one for phase in phases if (one := key._replace(phase=phase)) in recording.parts]


def holders_of(run: str, recording: Recording, key: Key) -> list[Holder]:
    """Return every holder of a part; for partial sums, all ranks as one."""
    parts = recording.parts.get(key, [])
    holders = [Holder(run, (part.rank,), part.box, significant_values(key, part, recording)) for part in parts]
    if key.name.endswith("attention.k") and recording.about.model.position_embedding_type != "rope":
        return without_common_part(holders) if holders else []
    return summed(run, parts, holders)


def summed(run: str, parts: Sequence[TensorPart], holders: list[Holder]) -> list[Holder]:
    """Return the holders of a tensor's parts; for partial sums, all ranks as one."""
    if not any(part.summed for part in parts):
        return holders
    shape = whole_shape(holders)
    total = np.zeros_like(holders[0].values, shape=shape)
    with np.errstate(invalid="ignore"):
        for holder in holders:
            total[holder.box] += holder.values
    return [Holder(run, tuple(sorted({part.rank for part in parts})), tuple(slice(0, n) for n in shape), total)]


def significant_values(key: Key, part: TensorPart, recording: Recording):
    """Return a part's values in float64, without components that the loss ignores."""
    values, c, rows = np.array(recording.load(part), np.float64), recording.about.model, inert_rows(key.name)
    rotated = c.position_embedding_type == "rope" and "attention" in key.name
    normed = c.qk_layernorm and key.name.endswith(("b_qkv", "b_kv"))
    if rows is not None and not rotated and not normed:
        start, stop, _ = rows.indices(part.first[0] + len(values))
        values[max(start - part.first[0], 0):max(stop - part.first[0], 0)] = 0
    return values


def without_common_part(holders: list[Holder]) -> list[Holder]:
    """Subtract from keys [b, s, a, d] their mean over all positions, which with context parallelism no rank has."""
    whole, there = assemble(holders, whole_shape(holders))
    mean = whole.sum(1, keepdims=True) / np.maximum(there.sum(1, keepdims=True), 1)
    return [one._replace(values=one.values - mean[(one.box[0], slice(None), *one.box[2:])]) for one in holders]


def assemble(holders: list[Holder], shape: tuple[int, ...]):
    """Assemble the whole, and a mask of its known elements. The first holder wins."""
    whole, known = np.zeros(shape), np.zeros(shape, bool)
    for holder in holders:
        whole[holder.box] = np.where(known[holder.box], whole[holder.box], holder.values)
        known[holder.box] = True
    return whole, known


def distance(x, y):
    """Compute |x - y|: 0 where both are the same infinity, or NaN; infinite where only one is."""
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        return np.where(same, 0, np.nan_to_num(abs(x - y), nan=np.inf, posinf=np.inf))


def magnitude(x: Any) -> float:
    return float(abs(x[np.isfinite(x)]).max(initial=0))


def contains(box: tuple[slice, ...], at: tuple[int, ...]) -> bool:
    return all(along.start <= i < along.stop for along, i in zip(box, at))


def is_moved_weight(key: Key, recording: Recording) -> bool:
    """Report whether these are weights that an update has moved."""
    return key.phase == "optimizer parameters" or (key.phase == "parameters" and is_after_update(key, recording))


def is_after_update(key: Key, recording: Recording) -> bool:
    """Report whether a recorded update came before."""
    return key.iteration > recording.first_iteration


def tolerance(key: Key, a: Recording, b: Recording) -> float:
    """Return the tolerance of the coarser of the two formats."""
    kind = "weights" if is_moved_weight(key, a) else "later" if is_after_update(key, a) else "first"
    return max(getattr(TOLERANCE[recording.about.format], kind) for recording in (a, b))


def epsilon(key: Key, recording: Recording) -> float:
    """Return the epsilon of the weights' format: the optimizer's, or the model's."""
    precision = Precision(recording.about.format)
    return FORMATS[precision.main if key.phase.startswith("optimizer") else precision.compute].epsilon
