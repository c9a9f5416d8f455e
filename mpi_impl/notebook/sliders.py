"""Sliders for t, p, d, v, m and the ZeRO stage that redraw the ranks' grid, memory, traffic and bubble immediately."""
import ipywidgets as widgets

from mpi_impl.notebook.plan import MODELS, draw_plan, plan
from mpi_impl.notebook.ranks import as_png
from reference.errors import UserError

POWERS = (1, 2, 4, 8, 16, 32, 64)


class Sliders(widgets.VBox):
    """Sliders with a text for stored notebooks, which hold no widgets."""

    def __repr__(self) -> str:
        return "Sliders, in a running notebook: run this cell."


def explore(**start) -> Sliders:
    """Show the sliders and the picture. `start` sets other initial values, as in explore(t=8, p=4)."""
    choice = {"model": "18.4B", "t": 8, "p": 1, "d": 4, "v": 1, "m": 8, "zero_stage": 0, "sequence_parallel": False}
    if unknown := set(start) - set(choice):
        raise UserError(f"explore has no slider {', '.join(sorted(unknown))}. It has {', '.join(choice)}.")
    choice |= start
    sliders = {
        "model": widgets.Dropdown(options=list(MODELS), description="model"),
        "t": widgets.SelectionSlider(options=POWERS[:4], description="t"),
        "p": widgets.SelectionSlider(options=POWERS, description="p"),
        "d": widgets.SelectionSlider(options=POWERS, description="d"),
        "v": widgets.IntSlider(min=1, max=4, description="v"),
        "m": widgets.SelectionSlider(options=POWERS, description="m"),
        "zero_stage": widgets.IntSlider(min=0, max=3, description="ZeRO"),
        "sequence_parallel": widgets.Checkbox(description="sequence parallel"),
    }
    picture, sentence = widgets.Image(format="png"), widgets.HTML()

    def redraw(_=None) -> None:
        try:
            chosen = plan(**{name: slider.value for name, slider in sliders.items()})
        except UserError as error:
            sentence.value, picture.layout.visibility = f"<b>{error}</b>", "hidden"
            return
        picture.value, sentence.value, picture.layout.visibility = as_png(draw_plan(chosen)), "", "visible"

    for name, slider in sliders.items():
        slider.value = choice[name]
        slider.observe(redraw, "value")
    redraw()
    rows = list(sliders.values())
    return Sliders([widgets.HBox(rows[i:i + 4]) for i in (0, 4)] + [sentence, picture])
