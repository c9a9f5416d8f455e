"""The picture of what crosses to the next stage shows as many pieces as are sent: all of each rank, or one."""
import pytest
from matplotlib.colors import to_hex

from mpi_impl.notebook.pictures.crossing import EMPTY, draw_crossing
from mpi_impl.notebook.pictures.shards import OWNERS


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("scattered", [False, True])
def test_a_receiver_has_the_pieces_that_crossed(t, scattered):
    """Row by row: all pieces at the sender, what has crossed at the receiver, and, if gathered, all again."""
    figure = draw_crossing(t, scattered)
    found = [to_hex(patch.get_facecolor()).upper() for patch in figure.axes[0].patches if hasattr(patch, "get_xy")
             and hasattr(patch, "get_width")]
    whole = list(OWNERS[:t])
    wanted = [color for rank in range(t)
              for color in (whole + [one if piece == rank else EMPTY for piece, one in enumerate(whole)] + whole
                            if scattered else whole + whole)]
    assert found == wanted
    said = [text.get_text() for text in figure.axes[0].texts]
    assert said.count(f"b s h / {t}" if scattered else "b s h") == t
    assert said.count("all-gather") == t * scattered
