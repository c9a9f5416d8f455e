"""The pictures of masks: what is kept has the colour of who drew it, what is dropped is white."""
import numpy as np
from matplotlib.colors import to_hex, to_rgb

from mpi_impl.notebook.pictures.masks import Drawn, draw_mask_parts, draw_masks
from mpi_impl.notebook.pictures.shards import OWNERS


def test_every_element_is_white_or_of_its_ranks_colour():
    keep = np.random.default_rng(1).random((3, 5)) < 0.5
    figure = draw_masks({"inside": [Drawn("head 0", keep, 0), Drawn("head 1", ~keep, 9)],
                         "outside": [Drawn("rank 1", keep, 1)]})
    drawn = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in drawn] == ["head 0", "head 1", "rank 1"]
    assert [drawn[0].get_ylabel(), drawn[2].get_ylabel()] == ["inside", "outside"]
    for axes, kept, color in zip(drawn, [keep, ~keep, keep], [OWNERS[0], OWNERS[1], OWNERS[1]]):
        pixels = np.asarray(axes.images[0].get_array())
        assert (pixels[kept] == to_rgb(color)).all() and (pixels[~kept] == 1).all()
    assert not any(axes.axison for axes in figure.axes if not axes.images)


def test_a_mask_over_all_heads():
    """A square for each element that is kept, in the colour of the rank that drew it."""
    masks = [np.array([[True, False, True], [False, True, True]]), np.array([[False, False, True]])]
    figure = draw_mask_parts({"both": masks, "one": masks[:1]}, "a title")
    both, one = figure.axes
    assert [axes.get_title(loc="left") for axes in (both, one)] == ["both", "one"]
    assert figure.get_suptitle() == "a title"
    found = [(patch.get_x(), patch.get_y(), to_hex(patch.get_facecolor()).upper()) for patch in both.patches]
    assert found == [(0, 0, OWNERS[0]), (2, 0, OWNERS[0]), (1, 1, OWNERS[0]), (2, 1, OWNERS[0]), (2, 2, OWNERS[1])]
    assert len(one.patches) == 4 and len(both.lines) == 2
