"""Between what ranks wrote down and what the simulator says: slices, timelines, and the times of actions."""
from collections.abc import Sequence
from itertools import chain
from statistics import median

from mpi_impl.comm.trace import Slice
from reference.schedules.actions import Schedule
from reference.schedules.simulate import Span, Timeline, Times


def slices_of(timeline: Timeline) -> list[list[Slice]]:
    """A simulated timeline as what ranks would have written down."""
    return [[Slice("compute", str(span.action), span.action.kind, span.start, span.end) for span in spans]
            for spans in timeline.ranks]


def timeline_of(ranks: Sequence[Sequence[Slice]]) -> Timeline:
    """The inverse, of ranks that did actions: what is no action is left out, as are ranks without one."""
    spans = (tuple(Span(s.action, s.start, s.end) for s in slices if s.action) for slices in ranks)
    return Timeline(tuple(filter(None, spans)))


def measured_times(ranks: list[list[list[Slice]]], schedule: Schedule, sending: float) -> Times:
    """How long each kind of action takes, by stage: the median over all steps of all ranks of a pipeline.

    A whole backward is put down as two halves: only their sum counts.
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    for s in chain(*(chain(*steps) for steps in ranks)):
        if s.action:
            seconds.setdefault((s.kind, s.action.stage), []).append(s.end - s.start)
    typical = {key: median(found) for key, found in seconds.items()}
    halves = {(kind, stage): time / 2 for (whole, stage), time in typical.items() if whole == "B" for kind in "IW"}
    forward, i, w = ([(halves | typical)[kind, stage] for stage in range(schedule.stages)] for kind in "FIW")
    return Times(forward, i, w, sending)
