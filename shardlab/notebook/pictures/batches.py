"""The picture of batches of requests: a row for each slot of the server, a box for each step of a request."""
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from reference.generation.batching import Step
from shardlab.notebook.pictures.shards import color_of
from shardlab.report.charts import finish
from shardlab.report.drawing import Picture, described, draw_box, name_rows, several_panels


def draw_batches(schedules: Mapping[str, Sequence[Step]], slots: int) -> Picture:
    """Draw one panel above the other, on one time axis. A prefill has its request's number."""
    figure, panels = several_panels(8.5, (0.32 * slots + 0.6) * len(schedules), len(schedules), sharex=True)
    for axes, (name, steps) in zip(panels, schedules.items()):
        for step, rows in zip(steps, slots_of(steps)):
            for i, row in rows.items():
                prefill = step.work[i].tokens == step.work[i].positions
                draw_box(axes, step.start, row + 0.06, step.end - step.start, 0.88, color_of(i),
                         str(i) if prefill else "", edgecolor="white", linewidth=0.8)
        name_rows(axes, [f"slot {row}" for row in range(slots)])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(0, max(steps[-1].end for steps in schedules.values()))
        finish(axes, "time", name, "x")
    return described(figure, "Requests in the slots of a server over time. ", (
        f"{name}: all is done at {steps[-1].end:.3g}, in {len(steps)} steps, with "
        f"{np.mean([len(step.work) for step in steps]):.2g} of {slots} slots in use on average"
        for name, steps in schedules.items()))


def slots_of(steps: Sequence[Step]) -> list[dict[int, int]]:
    """Return the slot of each request in each step. It keeps its slot, and takes the lowest one that is free."""
    rows, slots = dict[int, int](), list[dict[int, int]]()
    for step in steps:
        rows = {i: row for i, row in rows.items() if i in step.work}
        for i in sorted(step.work.keys() - rows):
            rows[i] = min({*range(len(step.work))} - {*rows.values()})
        slots.append(rows)
    return slots
