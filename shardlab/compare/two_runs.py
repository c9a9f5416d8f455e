"""The page of two runs beside each other: `compare --report`. It is the player of a run, twice.

Both runs have the same ranks and microbatches, so each rank of one has its counterpart in the other. The page marks the
tensors that differ, at their time and on their rank, and the messages that only one of the two has sent.
"""
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from mpi_impl.comm.clock import TICK, TickingClock
from reference.costs.volumes import PassCounts
from reference.errors import UserError
from reference.precision import Precision
from shardlab.compare.differences import Findings, TensorDifference
from shardlab.compare.names import Key
from shardlab.compare.recording import Recording
from shardlab.compare.report import ranks as ranks_of
from shardlab.compare.steps import Call, RankStep
from shardlab.report.charts import COLORS, WORDS
from shardlab.report.page.played_step import RECEIVES
from shardlab.report.page.report import ReportedRun, page as page_of, player, topology

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "context_parallel_size",
         "expert_model_parallel_size")
ALL = 1 << 30           # differences for `compare` to look for
MOST = 5_000            # differences and marks on the page, and
MOST_TENSORS = 30_000   # tensors of all ranks whose names it tells


class DifferentCall(NamedTuple):
    """A call that only one run has made (the other's is None), or that both have made with different arguments."""

    iteration: int
    at: float          # ticks
    rank: int
    a: Call | None
    b: Call | None

    @property
    def kind(self) -> tuple:
        """Return what such calls have in common for all ranks, layers and microbatches."""
        return tuple(call and (call.entry, call.elements) for call in (self.a, self.b))

    @property
    def place(self) -> str:
        """Return the place of the call in its step."""
        return next(call.place for call in (self.a, self.b) if call)

    def __str__(self):
        if self.a and self.b:
            return f"A sent {self.a}, B {self.b}"
        return f"A sent {self.a}, B did not" if self.a else f"B sent {self.b}, A did not"


class Place(NamedTuple):
    """A place of a tensor: its rank, and the middle of the tick at which the rank computed it."""

    at: float
    rank: int


class TwoRuns:
    """Two recordings of runs on the same ranks. `found` has all their differences.

    The iteration to show is that of the first tensor that differs; if there is none, that of the first message.
    """

    def __init__(self, found: Findings, a: Recording, b: Recording):
        self.found, self.runs = found, {"A": a, "B": b}
        self.first = next(iter(found.differences), None)
        calls = [call for i in sorted(a.steps) for call in different_calls(i, a.steps[i], b.steps[i])]
        self.iteration = (self.first.key.iteration if self.first else
                          min((call.iteration for call in calls), default=a.first_iteration))
        self.calls = [call for call in calls if call.iteration <= self.iteration]

    def calls_by_kind(self, iteration: int) -> dict[tuple, list[DifferentCall]]:
        """Return an iteration's calls that differ, by their kind."""
        found: dict[tuple, list[DifferentCall]] = {}
        for call in self.calls:
            if call.iteration == iteration:
                found.setdefault(call.kind, []).append(call)
        return found

    @cached_property
    def times(self) -> dict[tuple, float]:
        """Map each part of a tensor, by run, rank, phase, name and place in the whole, to the middle of its tick."""
        return {(name, rank, *seen[1:]): round(seen.at / TICK - 0.5, 1) for name, run in self.runs.items()
                for rank, step in enumerate(run.steps[self.iteration]) for seen in step.seen}

    def places(self, one: TensorDifference) -> set[Place]:
        """Return where the parts of a tensor that differ have been seen."""
        assert isinstance(one.key, Key)
        found = set()
        for holder in one.holders:
            for part in self.runs[holder.run].parts.get(one.key, []):
                at = self.times.get((holder.run, part.rank, one.key.phase, one.key.name, part.first))
                if at is not None and part.rank in holder.ranks and (part.summed or part.box == holder.box):
                    found.add(Place(at, part.rank))
        return found

    @cached_property
    def first_places(self) -> list[Place]:
        """Return where the first tensor that differs is seen first: on one rank, or on several at the same tick."""
        found = self.places(self.first) if self.first else set()
        return sorted(place for place in found if place.at == min(found).at)

    @property
    def message(self) -> DifferentCall | None:
        """Return the last different call before the first tensor that differs, on a rank that has it."""
        if not self.first:
            return self.calls[0] if self.calls else None
        before = [call for call in self.calls for place in self.first_places
                  if call.rank == place.rank and call[:2] <= (self.iteration, place.at)]
        return max(before, key=lambda call: call[:2], default=None)


def different_calls(iteration: int, a: Sequence[RankStep], b: Sequence[RankStep]) -> Iterator[DifferentCall]:
    """Yield the calls by which two steps differ, rank by rank. Calls for the same purpose are compared."""
    for rank, (one, other) in enumerate(zip(a, b, strict=True)):
        ours, theirs = by_purpose(one.calls), by_purpose(other.calls)
        for purpose in ours | theirs:
            pair = ours.get(purpose), theirs.get(purpose)
            made = [call for call in pair if call]
            if len(made) < 2 or made[0]._replace(at=0) != made[1]._replace(at=0):
                yield DifferentCall(iteration, round(made[0].at / TICK, 1), rank, *pair)


def by_purpose(calls: Sequence[Call]) -> dict[tuple, Call]:
    """Map what each call is for, and its number among those for the same purpose, to the call."""
    seen, found = Counter[tuple](), {}
    for call in calls:
        seen[call.purpose] += 1
        found[call.purpose, seen[call.purpose]] = call
    return found


def check_comparable(a: Recording, b: Recording) -> None:
    """Raise UserError for runs whose ranks or actions have no counterparts."""
    sizes = [{name.replace("_", " "): getattr(run.about.parallel, name) for name in SIZES}
             | {"number of microbatches": microbatches(run.steps[run.first_iteration])} for run in (a, b)]
    for name, one in sizes[0].items():
        if one != (other := sizes[1][name]):
            raise UserError(f"--report shows two runs rank by rank and action by action, but the {name} is {one} in A "
                            f"and {other} in B. Give both the same, or leave --report out: without it, runs on any two "
                            "topologies are compared.")


def microbatches(step: Sequence[RankStep]) -> int:
    """Return the number of a replica's microbatches."""
    return 1 + max(one.action.microbatch for one in step[0].slices if one.action)


# ---- in words -------------------------------------------------------------------------------------------------------


def explain_tensor(two: TwoRuns) -> str:
    """Name the first tensor that differs, and its place."""
    if (one := two.first) is None:
        return "A and B agree: no tensor differs by more than rounding."
    layer = "" if one.key.layer is None else f" of layer {one.key.layer}"
    places = ", ".join(f"rank {rank} at tick {at + 0.5:.0f}" for at, rank in two.first_places)
    return (f"The first tensor that differs: {name_of(one.key)}{layer}, in the phase '{one.key.phase}' of iteration "
            f"{one.key.iteration}, on {ranks_of(one)}. The largest difference is {one.size:.2g}; rounding explains "
            f"{one.allowed * one.unit:.0e}. It appears on {places}.")


def explain_message(two: TwoRuns) -> str:
    """Say which message was missing where the first tensor differs, or that none was."""
    if (one := two.message) is None:
        later = sum(map(len, two.calls_by_kind(two.iteration).values()))
        told = (f"{later} messages of this iteration differ, but only after it." if later else
                "Both send the same messages in this iteration.")
        return told + " The mistake is in what a rank computes, not in what it sends." * bool(two.first)
    same_kind = two.calls_by_kind(one.iteration)[one.kind]
    return (f"In {one.place} of iteration {one.iteration}: {one}. In that iteration this is so "
            f"{len(same_kind)} times, on ranks {ranks_in(same_kind)}.")


def ranks_in(calls: Sequence[DifferentCall]) -> str:
    return ", ".join(map(str, sorted({call.rank for call in calls})))


def name_of(key) -> str:
    return f"{'the gradient of ' if key.of_a_gradient else ''}{key.name}"


# ---- the data of the page -------------------------------------------------------------------------------------------


def page(two: TwoRuns, said: str, names: Mapping[str, str], about: Mapping[str, str] | None = None) -> str:
    """Return the page. `said` is what compare prints, `names` says what A and B are, and `about` what B's bug is."""
    return page_of({
        "title": "Two runs beside each other", "iteration": two.iteration, "text": said, "about": about,
        "tensor": explain_tensor(two), "message": explain_message(two),
        "at": [place.at for place in two.first_places[:1]],
        "calls": [[str(calls[0]), len(calls), ranks_in(calls)] for calls in two.calls_by_kind(two.iteration).values()],
        "differences": [[str(one.key), f"{one.size:.1e}", f"{one.relative:.1e}", ranks_of(one)]
                        for one in two.found.differences[:MOST]],
        "runs": [run_data(two, name) | {"name": name, "about": names[name]} for name in two.runs]}, "two_runs")


def run_data(two: TwoRuns, name: str) -> dict[str, Any]:
    """Return one run's step as a player needs it."""
    run = two.runs[name]
    step, c, p = run.steps[two.iteration], run.about.model, run.about.parallel
    m = microbatches(step)
    b = run.about.global_batch_size // (m * p.data_parallel_size)
    reported = ReportedRun("", c, p, Precision(run.about.format), b, run.about.sequence_length, m, (),
                           PassCounts(1, m, 0, 0), ())
    entries = dict.fromkeys(call.entry for one in step for call in one.calls)
    return {"player": player(TickingClock(), [visible(one) for one in step], reported) | {"clock": "ticks"},
            "topology": topology(reported, [0] * p.world_size), "run": {"p": p.pipeline_model_parallel_size},
            "words": WORDS, "colors": {"actions": COLORS}, "marks": list(marks(two, name))[-MOST:],
            "tensors": tensors(step), "ledger": [],
            "sent": {"reasons": [[entry.group, entry.phase, entry.reason] for entry in entries]}}


def visible(one: RankStep) -> list:
    """Widen collectives, which take no ticks."""
    return [s._replace(start=max(0.0, s.start - 0.3 * TICK), end=s.end + 0.3 * TICK)
            if s.start == s.end and s.name not in RECEIVES else s for s in one.slices]


def tensors(step: Sequence[RankStep]) -> dict[str, Any] | None:
    """Return the names of tensors, and each rank's as [time, number of its name]; None if they are too many."""
    names: dict[str, int] = {}
    ranks = [[[round(one.at / TICK - 0.5, 1), names.setdefault(name_of(Key(0, one.phase, one.name)), len(names))]
              for one in sorted(own.seen)] for own in step]
    return {"names": list(names), "ranks": ranks} if sum(map(len, ranks)) <= MOST_TENSORS else None


def marks(two: TwoRuns, run: str) -> Iterator[dict[str, Any]]:
    """Yield a run's marks: messages that differ; in B tensors that differ; and, in both, the first of them."""
    def mark(kind: str, at: float, rank: int, text: str) -> dict[str, Any]:
        return {"kind": kind, "at": at, "rank": rank, "text": text}

    for kind, calls in two.calls_by_kind(two.iteration).items():
        shape = "changed" if all(kind) else "sent" if kind["AB".index(run)] else "missing"
        for call in calls:
            yield mark(shape, call.at, call.rank, str(call)) | {"named": bool(two.message and kind == two.message.kind)}
    for one in two.found.differences if run == "B" else ():
        if one.key.iteration == two.iteration:
            yield from (mark("differs", *place, f"{name_of(one.key)} differs by {one.size:.1e}")
                        for place in two.places(one).difference(two.first_places))
    for place in two.first_places:
        yield mark("first", *place, f"the first tensor that differs, {name_of(two.found.differences[0].key)}")
