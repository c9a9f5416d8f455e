"""The pictures of attention: each head has its owner's colour, and its shares."""
import numpy as np
import pytest
from matplotlib.colors import to_hex

from mpi_impl.notebook.pictures.heads import FUTURE, draw_patterns, draw_qkv
from mpi_impl.notebook.pictures.shards import OWNERS, owners_of


def test_the_fused_columns_are_drawn_once_for_each_way():
    a, t = 4, 2
    ways = {"by heads": np.tile(owners_of(a, t), (3, 1)), "straight through": owners_of(3 * a, t).reshape(3, a)}
    figure = draw_qkv(ways, a)
    axes, = figure.axes
    drawn = [to_hex(patch.get_facecolor()).upper() for patch in axes.patches]
    blue, orange = OWNERS[:2]
    assert drawn == [blue, blue, orange, orange] * 3 + [blue] * 6 + [orange] * 6
    words = [text.get_text() for text in axes.texts]
    assert words == [*[f"{part}{head}" for part in "QKV" for head in range(a)] * 2, "queries", "keys", "values"]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(ways)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank 0", "rank 1"]


@pytest.mark.parametrize("causal", [True, False])
def test_a_pattern_has_its_shares_in_its_owners_colour(causal):
    probs = np.random.default_rng(1).dirichlet(np.ones(3), size=(2, 3))
    figure = draw_patterns(probs, [0, 3], ["a", "b", "c"], ["first", "second"], causal)
    for head, (axes, owner) in enumerate(zip(figure.axes, (0, 3))):
        image, = axes.images
        hidden = np.triu(np.ones((3, 3), bool), 1) & causal
        shown = image.get_array()
        assert (np.ma.getmaskarray(shown) == hidden).all() and (shown.data == probs[head]).all()
        assert image.get_clim() == (0, 1)
        assert to_hex(image.cmap(1.0)).upper() == OWNERS[owner] and to_hex(image.cmap(0.0)).upper() == "#FFFFFF"
        assert to_hex(image.cmap.get_bad()).upper() == FUTURE
        assert axes.get_title() == f"head {head}\n{('first', 'second')[head]}"
        assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "c"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank 0", "rank 3"]
