"""A list of schedules and sliders for p, m and v that redraw the timeline at once."""
import ipywidgets as widgets

from mpi_impl.notebook.pictures.pipelines import draw_schedules
from mpi_impl.notebook.ranks import as_png
from reference.errors import UserError
from reference.schedules.generators import SCHEDULES, make, takes_v
from reference.schedules.simulate import activations_in_flight

TRAINING = [name for name in SCHEDULES if name != "forward-only"]


def explore_schedules(**start) -> widgets.VBox:
    """The sliders above the picture. `start` gives some of them another first value: explore_schedules(p=8, m=16)."""
    choice = {"schedule": "1f1b", "p": 4, "m": 8, "v": 2}
    if unknown := set(start) - set(choice):
        raise UserError(f"explore_schedules has no slider {', '.join(sorted(unknown))}. It has {', '.join(choice)}.")
    choice |= start
    sliders = {
        "schedule": widgets.Dropdown(options=TRAINING, description="schedule"),
        "p": widgets.IntSlider(min=1, max=8, description="p"),
        "m": widgets.IntSlider(min=1, max=32, description="m"),
        "v": widgets.IntSlider(min=1, max=4, description="v"),
    }
    picture, sentence = widgets.Image(format="png"), widgets.HTML()

    def redraw(_=None) -> None:
        name, p, m, v = (slider.value for slider in sliders.values())
        sliders["v"].disabled = not takes_v(name)       # the others have one stage on each rank, or two
        try:
            schedule = make(name, p, m, v if takes_v(name) else None)
        except UserError as error:
            sentence.value, picture.layout.visibility = f"<b>{error}</b>", "hidden"
            return
        picture.value, picture.layout.visibility = as_png(draw_schedules({name: schedule})), "visible"
        sentence.value = describe(activations_in_flight(schedule), schedule.stages // p)

    for name, slider in sliders.items():
        slider.value = choice[name]
        slider.observe(redraw, "value")
    redraw()
    return widgets.VBox([widgets.HBox(list(sliders.values())), sentence, picture])


def describe(in_flight: list[int], v: int) -> str:
    """What the ranks hold at most, in a sentence."""
    part = "a rank's layers" if v == 1 else f"1/{v} of a rank's layers"
    return f"microbatches in flight on each rank, each of {part}: {', '.join(map(str, in_flight))}"
