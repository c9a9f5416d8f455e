"""Sliders that redraw a picture immediately: of a choice of t, p, d, v, m and ZeRO, and of pipeline schedules."""
from collections.abc import Callable

import ipywidgets as widgets

from mpi_impl.notebook.pictures.pipelines import draw_schedules
from mpi_impl.notebook.plan import MODELS, draw_plan, plan
from mpi_impl.notebook.ranks import as_png
from reference.errors import UserError
from reference.schedules.generators import SCHEDULES, make, takes_v
from reference.schedules.simulate import activations_in_flight

POWERS = (1, 2, 4, 8, 16, 32, 64)
TRAINING = [name for name in SCHEDULES if name != "forward-only"]


class Sliders(widgets.VBox):
    """Sliders with a text for stored notebooks, which hold no widgets."""

    def __repr__(self) -> str:
        return "Sliders, in a running notebook: run this cell."


def explore(**start) -> Sliders:
    """Show the sliders and the picture of a plan. `start` sets other initial values, as in explore(t=8, p=4)."""
    def draw(**chosen):
        return draw_plan(plan(**chosen)), ""

    return connect("explore", draw, start, {
        "model": widgets.Dropdown(options=list(MODELS), value="18.4B", description="model"),
        "t": widgets.SelectionSlider(options=POWERS[:4], value=8, description="t"),
        "p": widgets.SelectionSlider(options=POWERS, value=1, description="p"),
        "d": widgets.SelectionSlider(options=POWERS, value=4, description="d"),
        "v": widgets.IntSlider(min=1, max=4, value=1, description="v"),
        "m": widgets.SelectionSlider(options=POWERS, value=8, description="m"),
        "zero_stage": widgets.IntSlider(min=0, max=3, value=0, description="ZeRO"),
        "sequence_parallel": widgets.Checkbox(value=False, description="sequence parallel"),
    })


def explore_schedules(**start) -> Sliders:
    """Show sliders and the timeline of a schedule. `start` sets other initial values: explore_schedules(p=8, m=16)."""
    sliders = {
        "schedule": widgets.Dropdown(options=TRAINING, value="1f1b", description="schedule"),
        "p": widgets.IntSlider(min=1, max=8, value=4, description="p"),
        "m": widgets.IntSlider(min=1, max=32, value=8, description="m"),
        "v": widgets.IntSlider(min=1, max=4, value=2, description="v"),
    }

    def draw(schedule: str, p: int, m: int, v: int):
        sliders["v"].disabled = not takes_v(schedule)       # the others have one stage on each rank, or two
        made = make(schedule, p, m, v if takes_v(schedule) else None)
        return draw_schedules({schedule: made}), describe(activations_in_flight(made), made.stages // p)

    return connect("explore_schedules", draw, start, sliders)


def describe(in_flight: list[int], v: int) -> str:
    """Describe the most that the ranks hold, in a sentence."""
    part = "a rank's layers" if v == 1 else f"1/{v} of a rank's layers"
    return f"microbatches in flight on each rank, each of {part}: {', '.join(map(str, in_flight))}"


def connect(name: str, draw: Callable, start: dict, sliders: dict) -> Sliders:
    """Connect sliders to `draw`, which returns a figure and a sentence, or raises UserError; show them."""
    if unknown := set(start) - set(sliders):
        raise UserError(f"{name} has no slider {', '.join(sorted(unknown))}. It has {', '.join(sliders)}.")
    picture, sentence = widgets.Image(format="png"), widgets.HTML()

    def redraw(_=None) -> None:
        try:
            figure, said = draw(**{key: slider.value for key, slider in sliders.items()})
        except UserError as error:
            sentence.value, picture.layout.visibility = f"<b>{error}</b>", "hidden"
            return
        picture.value, sentence.value, picture.layout.visibility = as_png(figure), said, "visible"

    for key, slider in sliders.items():
        slider.value = start.get(key, slider.value)
        slider.observe(redraw, "value")
    redraw()
    rows = list(sliders.values())
    return Sliders([widgets.HBox(rows[i:i + 4]) for i in range(0, len(rows), 4)] + [sentence, picture])
