"""A step of a run as data for the page's player: what each rank computes, waits for and sends, and when.

Times are microseconds since the first rank began. All comes from the traced slices, but the messages between stages:
those are the schedule's, sent where the action that makes them ends. A message arrives when the receiver's wait for it
ends, or where it did not have to wait, after the time of the virtual clock's link.
"""
from collections import deque
from collections.abc import Sequence
from typing import Any

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


def played_step(clock: Clock, ranks: Sequence[Sequence[Slice]], schedule: Schedule, c: ParallelConfig,
                message_bytes: int) -> dict[str, Any]:
    """Return a step of all ranks on this clock. `message_bytes` is what a rank sends to the next stage at a time."""
    sending = clock.link.seconds("send", 2, message_bytes) if isinstance(clock, VirtualClock) else None
    began, shown = min(s.start for slices in ranks for s in slices), ranks[:MOST_RANKS]
    until = last_microbatch(schedule, len(shown))
    actions = [actions_of(slices, began, until) for slices in shown]
    lowered, colors = lower(schedule), survey(c)
    waits = [waits_of(slices, lowered[place(r, c).pipeline], members(r, "pipeline", colors), began)
             for r, slices in enumerate(shown)]
    end = max(a["end"] for own in actions for a in own) if until < schedule.microbatches else microseconds(
        max(s.end for slices in shown for s in slices) - began)
    waits = [[one for one in own if one[1] < end] for own in waits]
    if left_out := sum(map(len, waits)) > MOST_SLICES:
        waits = [outside(own, actions[r])[:MOST_SLICES // len(shown)] for r, own in enumerate(waits)]
    names = sorted({one[0] for own in waits for one in own})
    return {"clock": "virtual" if isinstance(clock, VirtualClock) else type(clock).__name__,
            "end": end, "microbatches": schedule.microbatches, "shown_microbatches": min(until, schedule.microbatches),
            "message_bytes": message_bytes, "left_out": left_out, "names": names,
            "ranks": [{"actions": [list(a.values()) for a in own],
                       "slices": [[names.index(name), start, stop, *more] for name, start, stop, *more in waits[r]]}
                      for r, own in enumerate(actions)],
            "messages": messages(actions, shown, schedule, c, began, sending)}


def last_microbatch(schedule: Schedule, ranks: int) -> int:
    """Return the number of microbatches of which the player shows the actions."""
    each = sum(map(len, schedule.ranks)) / schedule.p / schedule.microbatches        # actions of a rank
    return max(1, min(schedule.microbatches, int(MOST_ACTIONS / (ranks * each))))


def microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def actions_of(slices: Sequence[Slice], began: float, until: int) -> list[dict[str, Any]]:
    """Return a rank's actions of the first microbatches, in order."""
    return [{"name": s.name, "start": microseconds(s.start - began), "end": microseconds(s.end - began)}
            for s in slices if s.action and s.action.microbatch < until]


def waits_of(slices: Sequence[Slice], steps: Sequence[Step], pipeline: Sequence[int], began: float) -> list[tuple]:
    """Return everything else that a rank did, each with its name, start and end: collectives, the optimizer, waits.

    A wait for another stage has also the result, and the rank that it comes from, which the schedule knows.
    """
    receives, found = iter([step for step in steps if isinstance(step, Receive)]), []
    for s in slices:
        if not s.action:
            waited = next(receives) if s.name in RECEIVES else None
            found.append((s.name, microseconds(s.start - began), microseconds(s.end - began),
                          *((str(waited.action), pipeline[waited.source]) if waited else ())))
    return found


def outside(own: list[tuple], actions: Sequence[dict[str, Any]]) -> list[tuple]:
    """Leave out what happens inside of actions."""
    found, rest = [], deque(actions)
    for one in sorted(own, key=lambda one: one[1]):
        while rest and rest[0]["end"] <= one[1]:
            rest.popleft()
        if not (rest and rest[0]["start"] <= one[1] < rest[0]["end"]):
            found.append(one)
    return found


def messages(actions: Sequence[Sequence[dict[str, Any]]], shown: Sequence[Sequence[Slice]], schedule: Schedule,
             c: ParallelConfig, began: float, sending: float | None) -> list[list]:
    """Return [from, to, result, sent, arrived, used] of each message between stages, in the order of sending."""
    lowered, found, colors = lower(schedule), [], survey(c)
    spans = [{a["name"]: a for a in own} for own in actions]
    arrivals = [arrivals_of(slices, lowered[place(r, c).pipeline], began) for r, slices in enumerate(shown)]
    for rank, own in enumerate(spans):
        pipeline = members(rank, "pipeline", colors)
        source: dict[Action, Action] = {}
        for step in lowered[place(rank, c).pipeline]:
            if isinstance(step, Action):
                source[result(step)] = step                   # the gradient of an I is known as its B
            elif isinstance(step, Send) and (to := pipeline[step.to]) < len(shown):
                sender, receiver = own.get(str(source[step.action])), arrivals[to].get(step.action)
                if sender and receiver:
                    waited_from, waited_until, user = receiver
                    sent = sender["end"]
                    arrived = waited_until if sending is None else max(sent + 1e6 * sending, sent)
                    if waited_from < arrived <= waited_until or sending is None:
                        arrived = waited_until
                    used = spans[to].get(str(user), {"start": arrived})["start"]
                    found.append([rank, to, str(step.action), sent, round(max(sent, arrived), 1), used])
    return sorted(found, key=lambda one: one[3])


def arrivals_of(slices: Sequence[Slice], steps: Sequence[Step],
                began: float) -> dict[Action, tuple[float, float, Action]]:
    """Map each result that a rank receives to its wait, from and until, and the action that uses it.

    A rank waits in the order of its schedule, and each wait is a slice.
    """
    waits = iter([s for s in slices if s.name in RECEIVES])
    found = {}
    for i, step in enumerate(steps):
        if isinstance(step, Receive):
            wait = next(waits)
            user = next(later for later in steps[i + 1:] if isinstance(later, Action))
            found[step.action] = (microseconds(wait.start - began), microseconds(wait.end - began), user)
    return found
