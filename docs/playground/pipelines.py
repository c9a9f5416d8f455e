"""The computations of the page of pipeline schedules, all of them by the textbook. Values are as JSON has them.

A state is what the page's address holds, each value as the reader typed it: see DEFAULTS. F, I and W are durations of a
rank's layers, of which each of its stages has an equal part; `link` is the duration of a transfer, `size` that of a
microbatch's activations of a rank's layers, in GB. `order` is an edited schedule, as CSV; without it, `schedule` is
generated.
"""
import re

from reference.errors import UserError
from reference.schedules.actions import Schedule, from_csv, to_csv
from reference.schedules.generators import SCHEDULES, make, takes_v
from reference.schedules.simulate import Times, activations_held, simulate
from reference.schedules.validate import ScheduleError, validate

DEFAULTS = {"schedule": "1f1b", "p": "4", "m": "8", "v": "2", "F": "1", "I": "1", "W": "1", "link": "0", "size": "1",
            "order": ""}
NUMBERS = {"F": "The duration of F", "I": "The duration of I", "W": "The duration of W",
           "link": "The duration of a transfer", "size": "The size of activations"}
MOST_FORWARDS = 1000        # that a page draws without making its reader wait
MOST_QUOTED = 40            # characters of a value in a link


def first_answers() -> dict:
    """Return the state that the page begins with, and what it shows of each schedule of these sizes."""
    return {"state": DEFAULTS, "answers": {name: play(DEFAULTS | {"schedule": name}) for name in SCHEDULES},
            "takes_v": [name for name in SCHEDULES if takes_v(name)]}


def play(state: dict) -> dict:
    """Return the timeline, the bubble and the memory of a state. Raises UserError if it is not a valid one."""
    state = {name: text if name == "order" else text[:MOST_QUOTED] for name, text in state.items()}
    schedule = schedule_of(state)
    validate(schedule)
    stages = schedule.placement()
    part = [1 / len(stages[rank]) for _, rank in sorted(schedule.rank_of().items())]      # of a rank's layers, by stage
    forward, input_gradient, weight_gradient, link, size = (number(state, name) for name in NUMBERS)
    timeline = simulate(schedule, Times([forward * x for x in part], [input_gradient * x for x in part],
                                        [weight_gradient * x for x in part], link))
    if not timeline.work:
        raise UserError("No action takes time. Choose durations above 0.")
    ranks = []
    for spans, held, mine in zip(timeline.ranks, activations_held(schedule), stages):
        busy, memory = sum(span.end - span.start for span in spans), max(held) * size / len(mine)
        ranks.append({"actions": [[str(action), start, end, count] for (action, start, end), count in zip(spans, held)],
                      "stages": " ".join(map(str, mine)), "busy": f"{busy:.4g}",
                      "idle": f"{timeline.makespan - busy:.4g}", "peak": max(held), "memory": memory,
                      "says": f"{memory:.4g} GB"})
    return {"ranks": ranks, "csv": to_csv(schedule), "p": schedule.p, "m": schedule.microbatches,
            "makespan": timeline.makespan, "takes": f"{timeline.makespan:.4g}",
            "bubble": f"{timeline.bubble_fraction:.4g}", "rate": f"{timeline.bubble_rate:.4g}",
            "about": "A schedule that was edited here." if state["order"] else
            (SCHEDULES[state["schedule"]].__doc__ or "").split("\n")[0].replace("`", "")}


def move(state: dict, rank: int, place: int, to: int) -> dict:
    """Move an action of a rank to another place in its order: return the new order, or why it cannot be."""
    schedule = schedule_of(state)
    actions = list(schedule.ranks[rank])
    actions.insert(to, actions.pop(place))
    moved = Schedule((*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1:]))
    try:
        validate(moved)
    except ScheduleError as error:
        sentence, table = str(error).split("\n", 1)
        return {"refusal": sentence, "table": table, "marked": re.findall(r">(\w+)<", table)}
    return {"order": to_csv(moved)}


def schedule_of(state: dict) -> Schedule:
    """Return the schedule of a state, if the page can draw it."""
    if state["order"]:
        schedule = from_csv(state["order"])
        if not all(schedule.ranks):
            raise UserError("Each line of a schedule has the actions of one rank, but there is a line without any. "
                            "Delete it, or write its actions.")
        check_drawable(sum(action.kind == "F" for actions in schedule.ranks for action in actions))
        return schedule
    name, p, m = state["schedule"], whole(state, "p"), whole(state, "m")
    v = whole(state, "v") if name in SCHEDULES and takes_v(name) else None
    check_drawable(p * m * (v or 1))
    return make(name, p, m, v)


def check_drawable(forwards: int) -> None:
    if forwards > MOST_FORWARDS:
        raise UserError(f"This page draws up to {MOST_FORWARDS:,} forwards, but there would be {forwards:,}. Choose "
                        "smaller sizes; python -m reference.schedules takes larger ones.")


def whole(state: dict, name: str) -> int:
    try:
        return int(state[name])
    except ValueError:
        raise UserError(f"{name} is {state[name]!r}, but must be a whole number.") from None


def number(state: dict, name: str) -> float:
    try:
        value = float(state[name])
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e6:
        raise UserError(f"{NUMBERS[name]} is {state[name]!r}, but must be a number from 0 to a million.")
    return value
