"""The pictures of arrays sharded by vocabulary show each token's owner, and a bar for each token but the padding."""
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from mpi_impl.notebook.pictures.shards import OWNERS
from mpi_impl.notebook.pictures.vocabulary import NOTHING, draw_lookup, draw_vocabulary


def test_each_token_is_shown_for_its_owner_and_in_the_sum():
    text, owners, t = ["a", "b", "c"], [0, 2, 0], 3
    axes, = draw_lookup(text, owners, t).axes
    drawn = [to_hex(patch.get_facecolor()).upper() for patch in axes.patches]
    texts = [label.get_text() for label in axes.texts]
    each = t + 1                                                    # boxes of a token: the ranks', and the sum's
    for i, (token, owner) in enumerate(zip(text, owners)):
        assert drawn[each * i:each * (i + 1)] == [OWNERS[owner] if rank == owner else NOTHING
                                                  for rank in range(t)] + [OWNERS[owner]]
        column = texts[(each + 1) * i:(each + 1) * (i + 1)]
        assert column == [token if rank == owner else "0" for rank in range(t)] + [token, token]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "sum"]


def test_tokens_have_bars_and_padding_has_none():
    values = np.array([1.0, -2.0, 3.0, -np.inf])
    figure = draw_vocabulary({"logits": values, "again": values}, ["x", "y", "z"], 2, target=1)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["logits", "again"]
    for axes in figure.axes:
        bars, padding = axes.containers, axes.patches[-1]
        assert [bar.patches[0].get_height() for bar in bars] == [1.0, -2.0, 3.0]
        assert [to_hex(bar.patches[0].get_facecolor()).upper() for bar in bars] == [OWNERS[0], OWNERS[0], OWNERS[1]]
        assert [bar.patches[0].get_linewidth() > 0 for bar in bars] == [False, True, False], "the target has a frame"
        assert isinstance(padding, Rectangle) and (padding.get_x(), padding.get_width()) == (2.5, 1.0)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y", "z", "(padding)"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank 0", "rank 1", "the target"]


def test_without_padding_no_place_is_hatched():
    axes, = draw_vocabulary({"logits": np.ones(4)}, list("wxyz"), 2, target=0).axes
    assert len(axes.patches) == len(axes.containers) == 4
