"""Validation of a schedule, with an error that marks the bad cells in its table.

A valid schedule does every action once, in an order that each rank can follow, and ends. Whether it ends depends on the
kind of sends:

- nonblocking: a send is posted and the rank goes on; a receive waits. A good executor does this.
- blocking: a send waits until its receiver receives (a rendezvous). A beginner writes this. MPI hides the difference
  for small messages, which it buffers ("eager"), so a program may pass its tests and hang on real sizes.
"""
from reference.errors import UserError
from reference.schedules.actions import Action, Receive, Schedule, Send, Step, lower, needs, table


class ScheduleError(UserError):
    """An error sentence, with the schedule's table and the bad cells in angle brackets."""


def validate(schedule: Schedule, blocking: bool = False) -> None:
    """Raise ScheduleError if an action is missing, repeated or out of order, or if the ranks would wait forever."""
    places = places_of_actions(schedule)
    check_complete(schedule, places)
    check_order_on_ranks(schedule, places)
    check_it_ends(schedule, places, blocking)


def places_of_actions(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """Return the (rank, place) of each action; check that none is repeated, and that no stage is on two ranks."""
    places: dict[Action, tuple[int, int]] = {}
    for r, actions in enumerate(schedule.ranks):
        for i, action in enumerate(actions):
            if action in places:
                complain(schedule, f"{action} is done twice.", places[action], (r, i))
            places[action] = r, i
    home: dict[int, tuple[int, int]] = {}
    for action, place in places.items():
        if home.setdefault(action.stage, place)[0] != place[0]:
            complain(schedule, f"Stage {action.stage} is on rank {home[action.stage][0]} and on rank {place[0]}, but a "
                     "stage's weights are on one rank.", home[action.stage], place)
    return places


def check_complete(schedule: Schedule, places) -> None:
    """Check that every stage does F for every microbatch; if there is any backward, all of them, as B or as I and W."""
    trains = any(action.kind != "F" for action in places)
    for stage in range(schedule.stages):
        for i in range(schedule.microbatches):
            done = "".join(kind for kind in "FBIW" if Action(stage, kind, i) in places)
            if done not in (("FB", "FIW") if trains else ("F",)):
                complain(schedule, f"Stage {stage} does {' and '.join(done) or 'nothing'} for microbatch {i}, but "
                         f"should do {'F and B, or F, I and W' if trains else 'F'}.",
                         *(places[Action(stage, kind, i)] for kind in done))


def check_order_on_ranks(schedule: Schedule, places) -> None:
    """Check that F is before B or I, I before W, and neighbouring stages in order where they are on one rank."""
    stages = schedule.stages
    for action, (r, place) in places.items():
        own = {"F": "", "B": "F", "I": "F", "W": "I"}[action.kind]
        before = [Action(action.stage, own, action.microbatch)] if own else []
        if (need := needs(action, stages)) is not None:
            before.append(need if need in places else need._replace(kind="I"))
        for earlier in before:
            if places[earlier][0] == r and places[earlier][1] > place:
                complain(schedule, f"{action} comes before {earlier}, which it needs.", (r, place), places[earlier])


def check_it_ends(schedule: Schedule, places, blocking: bool) -> None:
    """Play the lowered schedule as far as it goes. If it stops, ranks wait for one another in a circle."""
    stuck = play(lower(schedule), blocking)
    if not stuck:
        return
    circle = wait_cycle(stuck)
    how = "with blocking sends" if blocking else "even with nonblocking sends"
    story = "; ".join(f"rank {r} waits {what(stuck[r])}" for r in circle)
    complain(schedule, f"The ranks deadlock, {how}: {story}.",
             *(places[cell(stuck[r], places)] for r in circle))


def play(steps: list[list[Step]], blocking: bool) -> dict[int, Step]:
    """Run every rank as far as it goes, regardless of time; return the step at which each is stuck, none if it ends.

    A rank that advances wakes the one that waits for it, so the work is linear in the number of steps.
    """
    at, posted = [0] * len(steps), set()
    ready = list(range(len(steps)))

    def head(r):
        return steps[r][at[r]] if at[r] < len(steps[r]) else None

    while ready:
        r = ready.pop()
        while (step := head(r)) is not None:
            if isinstance(step, Send):
                other = head(step.to)
                if blocking and other != Receive(step.action, r):
                    break
                posted.add(step.action)
                at[r] += 1
                if other == Receive(step.action, r):
                    ready.append(step.to)
            elif isinstance(step, Receive) and step.action not in posted:
                if blocking and head(step.source) == Send(step.action, r):
                    ready.append(step.source)
                break
            else:
                at[r] += 1
    return {r: step for r in range(len(steps)) if (step := head(r)) is not None}


def wait_cycle(stuck: dict[int, Step]) -> list[int]:
    """Return ranks each of which waits for the next, and the last for the first."""
    seen: list[int] = []
    r = min(stuck)
    while r not in seen:
        seen.append(r)
        step = stuck[r]
        assert not isinstance(step, Action)
        r = step.to if isinstance(step, Send) else step.source
    return seen[seen.index(r):]


def what(step: Step) -> str:
    """Describe the transfer in which a rank is stuck: it is never stuck in an action of its own."""
    if isinstance(step, Send):
        return f"to send {step.action} to rank {step.to}"
    assert isinstance(step, Receive)
    return f"for {step.action} of rank {step.source}"


def cell(step: Step, places) -> Action:
    """Return the table's action of a transfer: the sender's own, or the one that needs the received result."""
    assert not isinstance(step, Action)
    stage, kind, i = step.action
    if isinstance(step, Receive):
        stage += 1 if kind == "F" else -1
    return next(action for k in (kind, "I") if (action := Action(stage, k, i)) in places)


def complain(schedule: Schedule, sentence: str, *cells: tuple[int, int]) -> None:
    raise ScheduleError(f"{sentence}\n{table(schedule, cells)}")
