"""A step of a run as data for the page's player: what each rank computes, waits for and sends, and when.

Times are microseconds since the first rank began. All comes from the traced slices, but the messages between stages:
those are the schedule's, sent where the action that makes them ends. A message arrives when the receiver's wait for it
ends, or where it did not have to wait, after the time of the virtual clock's link.
"""
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi_impl.comm.clock import Clock, VirtualClock
from mpi_impl.comm.topology import place
from mpi_impl.comm.trace import Slice
from reference.config import ParallelConfig
from reference.schedules.actions import Action, Receive, Schedule, Send, Step, lower, result
from shardlab.predict.group import survey
from shardlab.report.page.senders import members

RECEIVES = ("receive activation", "receive gradient")       # the names of waits for other stages
MOST_RANKS = 64             # that are shown: the first ones
MOST_ACTIONS = 3_000        # of all ranks, and as many microbatches of each
MOST_SLICES = 12_000        # of communication: beyond that, those inside of actions are left out


class Shown(NamedTuple):
    """A slice as the page shows it. A wait for another stage has its result, the rank it comes from, and its user."""

    name: str
    start: float        # microseconds since the first rank began
    end: float
    result: Action | None = None
    source: int = 0
    user: Action | None = None


class RankTimeline(NamedTuple):
    """What a rank did: its actions, in their order, and everything else, collectives, the optimizer and waits."""

    steps: Sequence[Step]           # its schedule, with transfers
    pipeline: Sequence[int]         # the ranks of its pipeline
    actions: dict[Action, Shown]
    others: list[Shown]


def timeline(slices: Sequence[Slice], steps: Sequence[Step], pipeline: Sequence[int], began: float) -> RankTimeline:
    """Match a rank's slices with its schedule: it waits in that order, and each wait is a slice."""
    receives = ((step, next(later for later in steps[i:] if isinstance(later, Action)))
                for i, step in enumerate(steps) if isinstance(step, Receive))
    actions, others = dict[Action, Shown](), list[Shown]()
    for s in slices:
        shown = Shown(s.name, microseconds(s.start - began), microseconds(s.end - began))
        if s.action:
            actions[s.action] = shown
            continue
        if s.name in RECEIVES:
            step, user = next(receives)
            shown = shown._replace(result=step.action, source=pipeline[step.source], user=user)
        others.append(shown)
    return RankTimeline(steps, pipeline, actions, others)


def microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def played_step(clock: Clock, ranks: Sequence[Sequence[Slice]], schedule: Schedule, c: ParallelConfig,
                message_bytes: int) -> dict[str, Any]:
    """Return a step of all ranks on this clock. `message_bytes` is what a rank sends to the next stage at a time."""
    sending = clock.link.seconds("send", 2, message_bytes) if isinstance(clock, VirtualClock) else None
    began, lowered, colors = min(s.start for slices in ranks for s in slices), lower(schedule), survey(c)
    timelines = [timeline(slices, lowered[place(r, c).pipeline], members(r, "pipeline", colors), began)
                 for r, slices in enumerate(ranks[:MOST_RANKS])]
    until = last_microbatch(schedule, len(timelines))
    actions = [{action: shown for action, shown in one.actions.items() if action.microbatch < until}
               for one in timelines]
    end = max(shown.end for one, own in zip(timelines, actions)
              for shown in (*own.values(), *(one.others if until == schedule.microbatches else ())))
    others = [[shown for shown in one.others if shown.start < end] for one in timelines]
    if left_out := sum(map(len, others)) > MOST_SLICES:
        others = [outside(own, list(actions[r].values()))[:MOST_SLICES // len(timelines)]
                  for r, own in enumerate(others)]
    names = sorted({one.name for own in others for one in own})
    return {"clock": "virtual" if isinstance(clock, VirtualClock) else type(clock).__name__,
            "end": end, "microbatches": schedule.microbatches, "shown_microbatches": until,
            "message_bytes": message_bytes, "left_out": left_out, "names": names,
            "ranks": [{"actions": [shown[:3] for shown in actions[r].values()],
                       "slices": [[names.index(one.name), one.start, one.end,
                                   *((str(one.result), one.source) if one.result else ())] for one in own]}
                      for r, own in enumerate(others)],
            "messages": messages(timelines, actions, sending)}


def last_microbatch(schedule: Schedule, ranks: int) -> int:
    """Return the number of microbatches of which the player shows the actions."""
    each = sum(map(len, schedule.ranks)) / schedule.p / schedule.microbatches        # actions of a rank
    return max(1, min(schedule.microbatches, int(MOST_ACTIONS / (ranks * each))))


def outside(own: Sequence[Shown], actions: Sequence[Shown]) -> list[Shown]:
    """Leave out what happens inside of actions."""
    ends, found = [action.end for action in actions], []
    for one in sorted(own, key=lambda one: one.start):
        i = bisect_right(ends, one.start)       # of the first action that ends later
        if i == len(ends) or one.start < actions[i].start:
            found.append(one)
    return found


def messages(timelines: Sequence[RankTimeline], actions: Sequence[dict[Action, Shown]],
             sending: float | None) -> list[list]:
    """Return [from, to, result, sent, arrived, used] of each message between stages, in the order of sending."""
    found = []
    received = [{wait.result: wait for wait in one.others if wait.result} for one in timelines]
    for rank, one in enumerate(timelines):
        source: dict[Action, Action] = {}
        for step in one.steps:
            if isinstance(step, Action):
                source[result(step)] = step                   # the gradient of an I is known as its B
            elif isinstance(step, Send) and (to := one.pipeline[step.to]) < len(timelines):
                sender, wait = actions[rank].get(source[step.action]), received[to].get(step.action)
                if sender and wait and wait.user:
                    arrived = wait.end if sending is None else max(sender.end + 1e6 * sending, sender.end)
                    if wait.start < arrived <= wait.end:
                        arrived = wait.end
                    user = actions[to].get(wait.user)
                    found.append([rank, to, str(step.action), sender.end, round(max(sender.end, arrived), 1),
                                  user.start if user else arrived])
    return sorted(found, key=lambda one: one[3])
