"""The sliders draw the plan that they stand at, each of them, and say why where there is none."""
import ipywidgets as widgets
import pytest

from mpi_impl.notebook import sliders
from mpi_impl.notebook.plan import plan
from mpi_impl.notebook.sliders import explore
from reference.errors import UserError

NAMES = ("model", "t", "p", "d", "v", "m", "zero_stage", "sequence_parallel")
START = dict(zip(NAMES, ("18.4B", 8, 1, 4, 1, 8, 0, False)))
MOVED = {"model": "7.5B", "t": 4, "p": 4, "d": 8, "v": 2, "m": 16, "zero_stage": 2, "sequence_parallel": True}


@pytest.fixture
def drawn_plans(monkeypatch) -> list:
    """Return the list of the plans that are drawn, in order; their pictures are bytes of their own."""
    plans: list = []

    def draw(chosen):
        plans.append(chosen)
        return len(plans)

    monkeypatch.setattr(sliders, "draw_plan", draw)
    monkeypatch.setattr(sliders, "as_png", lambda number: b"picture %d" % number)
    return plans


def parts(box: widgets.VBox):
    """Return the sliders by name, the sentence, and the picture."""
    *rows, sentence, picture = box.children
    return dict(zip(NAMES, (slider for row in rows for slider in row.children), strict=True)), sentence, picture


def test_it_begins_with_a_picture(drawn_plans):
    found, sentence, picture = parts(explore())
    assert {name: slider.value for name, slider in found.items()} == START
    assert drawn_plans == [plan(**START)]
    assert (picture.value, sentence.value, picture.layout.visibility) == (b"picture 1", "", "visible")


def test_the_first_values_can_be_chosen(drawn_plans):
    found, *_ = parts(explore(model="39.1B", p=2))
    assert drawn_plans == [plan(**START | {"model": "39.1B", "p": 2})]
    assert found["p"].value == 2


def test_a_slider_that_there_is_not(drawn_plans):
    with pytest.raises(UserError, match="no slider b"):
        explore(b=2)


@pytest.mark.parametrize("name", NAMES)
def test_each_slider_redraws(drawn_plans, name):
    """From a pipeline, so that v can be moved."""
    start = START | {"p": 2}
    found, sentence, picture = parts(explore(**start))
    found[name].value = MOVED[name]
    assert drawn_plans == [plan(**start), plan(**start | {name: MOVED[name]})]
    assert (picture.value, sentence.value) == (b"picture 2", "")


def test_a_wrong_choice_hides_the_picture_and_says_why(drawn_plans):
    """And the next right one brings it back."""
    found, sentence, picture = parts(explore())
    found["v"].value = 2                                    # p is 1
    assert "there is no pipeline" in sentence.value and picture.layout.visibility == "hidden"
    assert len(drawn_plans) == 1
    found["p"].value = 2
    assert (sentence.value, picture.layout.visibility) == ("", "visible")
    assert drawn_plans[-1] == plan(**START | {"p": 2, "v": 2})
    found["p"].value = 16                                   # m is 8
    assert "no multiple of 16" in sentence.value and picture.layout.visibility == "hidden"


def test_the_picture_is_a_png():
    *_, picture = parts(explore(model="1.7B", t=1, d=1, m=2))
    assert bytes(picture.value).startswith(b"\x89PNG")


def test_a_stored_notebook_says_what_was_there(drawn_plans):
    """No list of widgets, with their addresses."""
    assert repr(explore()) == "Sliders, in a running notebook: run this cell."
