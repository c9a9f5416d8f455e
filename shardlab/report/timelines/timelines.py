"""Conversions between recorded slices and simulated timelines, and the measured times of actions."""
from collections.abc import Sequence
from itertools import chain
from statistics import median

from mpi_impl.comm.trace import Slice
from reference.schedules.actions import Schedule
from reference.schedules.simulate import Span, Timeline, Times


def slices_of(timeline: Timeline) -> list[list[Slice]]:
    """Convert a simulated timeline into slices, as ranks would have recorded them."""
    return [[Slice("compute", str(span.action), span.action.kind, span.start, span.end) for span in spans]
            for spans in timeline.ranks]


def timeline_of(ranks: Sequence[Sequence[Slice]]) -> Timeline:
    """Convert slices into a timeline, without those that are no actions and ranks that have none."""
    spans = (tuple(Span(s.action, s.start, s.end) for s in slices if s.action) for slices in ranks)
    return Timeline(tuple(filter(None, spans)))


def measured_times(ranks: list[list[list[Slice]]], schedule: Schedule, sending: float) -> Times:
    """Return the time of each kind of action, by stage: the median over all steps of all ranks of a pipeline.

    A whole backward counts as two halves: only their sum matters.
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    for s in chain(*(chain(*steps) for steps in ranks)):
        if s.action:
            seconds.setdefault((s.kind, s.action.stage), []).append(s.end - s.start)
    typical = {key: median(found) for key, found in seconds.items()}
    halves = {(kind, stage): time / 2 for (whole, stage), time in typical.items() if whole == "B" for kind in "IW"}
    forward, i, w = ([(halves | typical)[kind, stage] for stage in range(schedule.stages)] for kind in "FIW")
    return Times(forward, i, w, sending)
