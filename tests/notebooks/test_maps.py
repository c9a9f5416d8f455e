"""The picture of linear maps shows each element, and says on both sides whose the numbers are."""
import numpy as np
import pytest
from matplotlib.colors import to_hex

from mpi_impl.notebook.pictures.maps import Map, draw_maps, replicated
from mpi_impl.notebook.pictures.shards import OWNERS, WHOLE, owners_of

WHITE = "#FFFFFF"


def colors(axes):
    return [to_hex(patch.get_facecolor()).upper() for patch in axes.patches]


def test_elements_have_the_colours_of_those_who_have_a_part_each():
    t, n = 2, 2
    f = np.vstack([np.eye(n)] * t)
    figure = draw_maps([Map("f", f, out=owners_of(n * t, t), into=replicated(n)),
                        Map("g", f.T, out=replicated(n), into=owners_of(n * t, t))], "a title")
    axes, = figure.axes
    blue, orange = OWNERS[:2]
    strips, elements = [blue, blue, orange, orange], [blue, WHITE, WHITE, blue, orange, WHITE, WHITE, orange]
    drawn = colors(axes)
    assert drawn[:6] == [*strips, WHOLE, WHOLE], "of f's rows, then of its columns"
    assert drawn[6:14] == elements
    assert drawn[14:20] == [WHOLE, WHOLE, *strips]
    assert drawn[20:] == [blue, WHITE, orange, WHITE, WHITE, blue, WHITE, orange]
    words = [text.get_text() for text in axes.texts]
    assert "".join(words[:8]) == "10011001" and words[8:10] == ["f", "[4, 2]"] and words[-1] == "a title"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank 0", "rank 1", "every rank"]


def test_the_same_matrix_may_have_other_owners_outside():
    figure = draw_maps([Map("gather", np.eye(3), out=owners_of(3, 3), into=owners_of(3, 3))])
    assert colors(figure.axes[0])[:6] == [*OWNERS[:3]] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize("t", [1, 4])
def test_what_is_drawn_lies_in_the_figure(t):
    figure = draw_maps([Map("f", np.ones((3 * t, 3)), owners_of(3 * t, t), replicated(3)),
                        Map("g", np.ones((3, 3 * t)), replicated(3), owners_of(3 * t, t))])
    axes, = figure.axes
    width, height = figure.get_size_inches()
    for patch in axes.patches:
        (x, y), w, h = patch.get_xy(), patch.get_width(), patch.get_height()
        assert min(x, y) >= 0 and x + w <= width and y + h <= height
