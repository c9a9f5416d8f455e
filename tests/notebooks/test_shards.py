"""The picture of shards: its rectangles tile each matrix, in the colours of their owners."""
import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from mpi_impl.notebook.pictures.shards import (OWNERS, WHOLE, by_columns, by_rows, draw_matrices, owners_of,
                                               partial_sums, stretches, whole)


@given(n=st.integers(0, 20), t=st.integers(1, 8))
def test_owners_are_those_of_array_split(n, t):
    for rank, part in enumerate(np.array_split(np.arange(n), t)):
        np.testing.assert_array_equal(np.flatnonzero(owners_of(n, t) == rank), part)


@given(owners=st.integers(1, 5).flatmap(lambda n: st.lists(
    st.lists(st.integers(-1, 3), min_size=n, max_size=n), min_size=1, max_size=5)))
def test_stretches_tile_a_matrix_and_have_one_owner_each(owners):
    owners = np.array(owners)
    times = np.zeros(owners.shape, int)
    for r, c, n, m in stretches(owners):
        times[r:r + n, c:c + m] += 1
        assert len(np.unique(owners[r:r + n, c:c + m])) == 1
    assert (times == 1).all()


def rectangles(axes):
    return [(round(patch.get_width(), 3), round(patch.get_height(), 3), to_hex(patch.get_facecolor()).upper())
            for patch in axes.patches if isinstance(patch, Rectangle)]


def test_a_product_is_drawn_with_its_shards_and_its_partial_sums():
    t = 2
    figure = draw_matrices([whole("X", 3, 4), "x", by_columns("A", 4, 6, t), "=", by_rows("Y", 5, 2, t, "a note"),
                            partial_sums("Z", 3, 3)], t, "a title")
    axes, = figure.axes
    drawn = rectangles(axes)
    assert drawn[0] == (4 * 0.16, 3 * 0.16, WHOLE)
    assert drawn[1:3] == [(3 * 0.16, 4 * 0.16, OWNERS[0]), (3 * 0.16, 4 * 0.16, OWNERS[1])]
    assert [(h, color) for _, h, color in drawn[3:5]] == [(3 * 0.16, OWNERS[0]), (2 * 0.16, OWNERS[1])]
    assert [color for *_, color in drawn[5:]] == [OWNERS[1], OWNERS[0]], "rank 0's sheet lies on top"
    words = [text.get_text() for text in axes.texts]
    assert [word for word in words if word in ("X", "x", "A", "=", "Y", "Z")] == ["X", "x", "A", "=", "Y", "Z"]
    assert "[4, 6]" in words and "a note" in words and "a title" in words
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["rank 0", "rank 1", "every rank"]


@pytest.mark.parametrize("t", [1, 5])
def test_matrices_do_not_overlap(t):
    axes, = draw_matrices([by_columns("A", 3, 9, t), by_rows("B", 9, 3, t), partial_sums("C", 3, 3)], t).axes
    spans = {}
    for patch in axes.patches:
        x, y = patch.get_xy()
        spans.setdefault(patch.get_facecolor(), []).append((x, y))
    edges = sorted((p.get_x(), p.get_x() + p.get_width()) for p in axes.patches)
    assert all(left >= 0 for left, _ in edges) and edges[-1][1] <= axes.get_xlim()[1]
    assert len({(p.get_x(), p.get_y()) for p in axes.patches}) == len(axes.patches)
