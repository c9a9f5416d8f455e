"""What the playground of pipeline schedules computes, by the textbook. Values are as JSON has them."""
from reference.schedules.generators import SCHEDULES, make


def play(state):
    return [list(map(str, rank)) for rank in make(state["schedule"], 4, 8, None).ranks]


def first_answers():
    return {name: play({"schedule": name}) for name in SCHEDULES if name != "interleaved"}
