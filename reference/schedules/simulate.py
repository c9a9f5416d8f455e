"""Simulation of a schedule from the time of each action: the timeline, the idle time and the memory.

A rank does its actions in order, each as soon as its inputs have arrived. A transfer between ranks takes the
communication time and slows no computation. The work is linear in the number of actions.
"""
from dataclasses import dataclass
from typing import NamedTuple

from reference.schedules.actions import KINDS, Action, Schedule, Times, needs, result


class Span(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def cost(self) -> float:
        """Return the longest of the ranks' own spans, from the start of its first action to the end of its last.

        Ranks that start later also end later: with no optimizer step to wait for, the slant costs nothing.
        """
        return max(spans[-1].end - spans[0].start for spans in self.ranks)

    @property
    def makespan(self) -> float:
        """Return the time from the first start of any rank to the last end of any."""
        return max(spans[-1].end for spans in self.ranks) - min(spans[0].start for spans in self.ranks)

    @property
    def work(self) -> float:
        """Return the computation time of the busiest rank: a step's time if it never waited."""
        return max(sum(span.end - span.start for span in spans) for spans in self.ranks)

    @property
    def bubble_fraction(self) -> float:
        """Return idle / ideal time over the whole makespan: (p - 1) / m for GPipe and 1F1B (Narayanan et al. 2021)."""
        return (self.makespan - self.work) / self.work

    @property
    def bubble_rate(self) -> float:
        """Return idle time / cost, as the zero-bubble paper prints it (Qi et al. 2023, section 5)."""
        return (self.cost - self.work) / self.cost


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Play the schedule. Raise ValueError if it stops forever; validate.py says why."""
    rank_of, stages = schedule.rank_of(), schedule.stages
    length = {(stage, kind): times.of(Action(stage, kind, 0)) for stage in range(stages) for kind in KINDS}
    ended: dict[Action, float] = {}                   # B and I of a stage give the same gradient: both stand here as B
    waiting: dict[Action, int] = {}                   # an action that has not ended: the rank that waits for it
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    ready = list(range(schedule.p))
    while ready:
        r = ready.pop()
        actions, done = schedule.ranks[r], spans[r]
        end = done[-1].end if done else 0.0
        for i in range(len(done), len(actions)):
            action = actions[i]
            start, need, gives = end, needs(action, stages), result(action)
            if need is not None:
                arrival = ended.get(need)
                if arrival is None:
                    waiting[need] = r
                    break
                start = max(end, arrival + (times.communication if rank_of[need.stage] != r else 0.0))
            end = start + length[action.stage, action.kind]
            done.append(Span(action, start, end))
            ended[gives] = end
            if gives in waiting:
                ready.append(waiting.pop(gives))
    if waiting:
        raise ValueError("The schedule never ends: " + ", ".join(
            f"rank {r} waits for {need}" for need, r in waiting.items()) + ".")
    return Timeline(tuple(map(tuple, spans)))


def activations_in_flight(schedule: Schedule) -> list[int]:
    """Return, for each rank, the peak number of stage caches that it holds."""
    return [max(held, default=0) for held in activations_held(schedule)]


def activations_held(schedule: Schedule) -> list[list[int]]:
    """Return, for each rank, the number of stage caches that it holds during each of its actions.

    It holds each from F until B, or until W. A forward without a backward keeps nothing: evaluation drops its caches
    immediately.
    """
    ranks = []
    for actions in schedule.ranks:
        kept = {(action.stage, action.microbatch) for action in actions if action.kind != "F"}
        held, during = 0, []
        for stage, kind, microbatch in actions:
            held += kind == "F" and (stage, microbatch) in kept
            during.append(held)
            held -= kind in "BW"
        ranks.append(during)
    return ranks
