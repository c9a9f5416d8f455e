"""The pictures of schedules: what they show is what the simulator says of those schedules."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.notebook.pictures.pipelines import draw_bubbles, draw_held, draw_schedules, held, play
from mpi_impl.notebook.sliders.schedules import TRAINING
from reference.schedules.generators import make, takes_v
from reference.schedules.simulate import activations_in_flight


@st.composite
def training_schedules(draw):
    name, p = draw(st.sampled_from(TRAINING)), draw(st.integers(1, 5))
    m = p * draw(st.integers(1, 3)) if name == "interleaved" else draw(st.integers(1, 9))
    return make(name, p, m, draw(st.integers(1, 3)) if takes_v(name) else None)


@given(training_schedules())
def test_what_is_held_over_time_is_at_most_what_is_in_flight(schedule):
    for spans, most in zip(play(schedule).ranks, activations_in_flight(schedule)):
        times, counts = held(spans)
        assert times == sorted(set(times)) and max(counts) == most and min(counts) >= 0 and counts[-1] == 0


@given(training_schedules())
def test_a_rank_does_as_much_whatever_the_number_of_its_stages(schedule):
    assert play(schedule).work == pytest.approx(3 * schedule.microbatches)


def test_a_timeline_for_each_schedule():
    figure = draw_schedules({"a": make("gpipe", 2, 3), "b": make("interleaved", 2, 4, 2)})
    assert [axes.get_title(loc="left").split(":")[0] for axes in figure.axes] == ["a", "b"]
    assert [sum(len(paths.get_paths()) for paths in axes.collections) for axes in figure.axes] == [2 * 6, 2 * 16]


def test_a_row_for_each_rank_with_its_activations():
    schedules = {"gpipe": make("gpipe", 3, 6), "zb-v": make("zb-v", 3, 6)}
    figure = draw_held(schedules)
    in_flight = [activations_in_flight(schedule) for schedule in schedules.values()]
    for rank, axes in enumerate(figure.axes):
        assert axes.get_ylabel() == f"rank {rank}"
        assert [max(line.get_ydata()) for line in axes.lines] == [in_flight[0][rank], in_flight[1][rank] / 2]
        assert [text.get_text() for text in axes.texts] == [f"at most {in_flight[0][rank]}, {in_flight[1][rank] / 2:g}"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gpipe", "zb-v"]


def test_dots_are_on_the_lines():
    axes, = draw_bubbles("1f1b", ps=[2, 4], ms=[1, 8]).axes
    formula_2, dots_2, formula_4, dots_4 = (np.array(line.get_ydata()) for line in axes.lines)
    np.testing.assert_allclose([formula_2, formula_4], [[1, 1 / 8], [3, 3 / 8]])
    np.testing.assert_allclose([dots_2, dots_4], [formula_2, formula_4])
    assert [text.get_text() for text in axes.texts] == ["p = 2", "p = 4"]
