"""The sliders of a pipeline schedule: its timeline, for the name of a schedule, p, m and v."""
from typing import Any

from reference.errors import UserError
from reference.schedules.actions import KINDS, Schedule
from reference.schedules.generators import SCHEDULES, make, takes_v
from reference.schedules.simulate import activations_in_flight
from shardlab.notebook.pictures.pipelines import play
from shardlab.notebook.sliders.page import Sliders
from shardlab.report.charts import COLORS, WORDS
from shardlab.report.drawing import is_light
from shardlab.report.timelines.gantt import shade

TRAINING = [name for name in SCHEDULES if name != "forward-only"]
CONTROLS: dict[str, list[Any]] = {"schedule": TRAINING, "p": [2, 4, 8], "m": list(range(1, 17)), "v": [2, 3, 4]}
START: dict[str, Any] = {"schedule": "1f1b", "p": 4, "m": 8, "v": 2}


def explore_schedules(**start) -> Sliders:
    """Show sliders and the timeline of a schedule. `start` sets other initial values: explore_schedules(p=8, m=16)."""
    return Sliders("schedule", CONTROLS, START | start, lambda: {
        "timelines": timelines(), "colors": colors(), "words": {kind: WORDS[kind] for kind in KINDS},
        "takesV": [name for name in TRAINING if takes_v(name)]})


def timelines() -> dict[str, str]:
    """Return the timeline for each position of the sliders, or a sentence that begins with `!`."""
    found = {}
    for name in TRAINING:
        for p in CONTROLS["p"]:
            for m in CONTROLS["m"]:
                for v in CONTROLS["v"] if takes_v(name) else [None]:
                    key = " ".join(map(str, (name, p, m) if v is None else (name, p, m, v)))
                    try:
                        found[key] = encode(make(name, p, m, v))
                    except UserError as error:
                        found[key] = f"!{error}"
    return found


def encode(schedule: Schedule) -> str:
    """Return the ranks' rows, joined by `/`, and the stage caches that each holds at most.

    An action is the idle time before it (nothing for 0), its kind, the place of its stage among the rank's, and its
    microbatch in base 36: `12F0a`. The unit of time is a stage's forward.
    """
    unit, rows = schedule.p / schedule.stages, []
    for spans, stages in zip(play(schedule).ranks, schedule.placement()):
        row, now = [], 0
        for action, start, end in spans:
            idle = round(start / unit) - now
            row.append(f"{idle or ''}{action.kind}{stages.index(action.stage)}{digit(action.microbatch)}")
            now = round(end / unit)
        rows.append("".join(row))
    return "/".join(rows) + "|" + ",".join(map(str, activations_in_flight(schedule)))


def digit(n: int) -> str:
    return "0123456789abcdefghijklmnopqrstuvwxyz"[n]


def colors() -> dict[str, list[list[list[str]]]]:
    """Map a kind to the colours of cells and letters of stage i of n: colors()[kind][n - 1][i]."""
    def pair(color: str) -> list[str]:
        return [color, "#000" if is_light(color) else "#fff"]

    return {kind: [[pair(shade(COLORS[kind], i, n)) for i in range(n)] for n in range(1, 5)] for kind in KINDS}
