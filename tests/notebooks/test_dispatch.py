"""The picture of the dispatch: as many copies leave as arrive, and every band joins what it says."""
import numpy as np
from hypothesis import given, strategies as st
from matplotlib.patches import Polygon, Rectangle

from mpi_impl.notebook.pictures.dispatch import COPY, draw_dispatch


@given(st.integers(1, 4), st.integers(1, 2), st.data())
def test_all_copies_are_drawn_on_both_sides(e, each, data):
    size = e * e * each
    counts = np.array(data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))).reshape(e, e * each)
    axes, = draw_dispatch(counts).axes
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    for boxes_of_side in (boxes[::2], boxes[1::2]):
        heights = [round(box.get_height() / COPY) for box in boxes_of_side]
        assert heights == counts.ravel().tolist() and len({box.get_x() for box in boxes_of_side}) == 1
    bands = [patch for patch in axes.patches if isinstance(patch, Polygon)]
    assert len(bands) == counts.size
    for box, to, along in zip(boxes[::2], boxes[1::2], bands, strict=True):
        corners = along.get_xy()
        assert np.isclose(corners[0][1], box.get_y()) and np.isclose(corners[1][1], to.get_y())
    labels = {text.get_text() for text in axes.texts}
    assert {f"rank {i}: {n}" for i, n in enumerate(counts.sum(1))} <= labels
    assert {f"expert {i}, on rank {i // each}: {n}" for i, n in enumerate(counts.sum(0))} <= labels
