"""Bars and curves show the numbers that they are given."""
import pytest

from mpi_impl.notebook.pictures.charts import draw_bars, draw_curves


def test_bars_are_made_of_their_parts():
    rows = {"one": {"a": 1.0, "b": 2.0}, "two": {"b": 4.0}}
    figure = draw_bars(rows, "bytes", "title", {"a": "#111111", "b": "#222222"}, " B")
    axes, = figure.axes
    bars = [(bar.get_x(), bar.get_width(), round(bar.get_y() + bar.get_height() / 2)) for bar in axes.patches]
    assert bars == [(0, 1, 0), (1, 2, 0), (0, 4, 1)]
    assert [text.get_text() for text in axes.texts] == ["3 B", "4 B"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"] and axes.get_xlabel() == "bytes"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


@pytest.mark.parametrize("log, scales", [("", ("linear", "linear")), ("xy", ("log", "log"))])
def test_equal_curves_can_all_be_seen(log, scales):
    axes, = draw_curves({"a": [3, 2, 1], "b": [3, 2, 1], "c": [1, 2, 4]}, "step", "loss", log=log).axes
    first, second, third = axes.lines
    assert list(first.get_ydata()) == list(second.get_ydata()) == [3, 2, 1] and list(third.get_xdata()) == [1, 2, 3]
    assert first.get_linewidth() > second.get_linewidth() > third.get_linewidth()
    assert (axes.get_xscale(), axes.get_yscale()) == scales
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "c"]
