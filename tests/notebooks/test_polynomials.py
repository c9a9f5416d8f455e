"""The pictures about proofs show where values agree, how rarely, and which differences floats see."""
import pytest
from matplotlib.colors import to_hex

from mpi_impl.notebook.pictures.polynomials import DIFFERENT, SAME, draw_chances, draw_differences, draw_meetings


def test_circles_are_where_both_are_equal():
    figure = draw_meetings([3, 1, 4, 1], [2, 1, 4, 0], ("f", "g"), "title")
    f, g, circles = figure.axes[0].lines
    assert list(f.get_ydata()) == [3, 1, 4, 1] and list(g.get_ydata()) == [2, 1, 4, 0]
    assert list(zip(*circles.get_data())) == [(1, 1), (2, 4)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["f", "g", "equal, 2 of 4"]


def test_the_bound_falls_with_the_prime_and_the_points_are_what_was_counted():
    figure = draw_chances(3, {11: 0.2, 101: 0.03}, {"large": 2**61 - 1}, {"likely": 0.1, "unlikely": 1e-17})
    axes, = figure.axes
    bound, counted, mark, *landmarks = axes.lines
    assert list(bound.get_ydata()) == [3 / 11, 3 / (2**61 - 1)] and axes.get_xscale() == axes.get_yscale() == "log"
    assert list(zip(*counted.get_data())) == [(11, 0.2), (101, 0.03)]
    assert list(mark.get_ydata()) == [3 / (2**61 - 1)]
    assert [line.get_ydata()[0] for line in landmarks] == [0.1, 1e-17]
    assert [(text.get_text(), text.get_ha()) for text in axes.texts] == [
        ("large", "right"), ("likely", "right"), ("unlikely", "left")], "away from the bound"


def test_differences_below_the_tolerance_are_in_the_grey_and_formulas_have_colours():
    found = {"fine": (1e-15, False), "hidden": (1e-13, True), "seen": (0.1, True), "equal": (0.0, False)}
    axes, = draw_differences(found, 1e-11).axes
    grey, = axes.patches
    assert grey.get_x() == axes.get_xlim()[0] and grey.get_x() + grey.get_width() == pytest.approx(1e-11)
    points = [line for line in axes.lines if line.get_marker() in "oX"]
    assert [point.get_xdata()[0] for point in points] == [1e-15, 1e-13, 0.1, axes.get_xlim()[0]]
    assert [to_hex(point.get_color()).upper() for point in points] == [SAME, DIFFERENT, DIFFERENT, SAME]
    assert [text.get_text() for text in axes.texts[2:]] == [
        "the same formula", "another formula", "another formula", "the same formula"]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(found)
