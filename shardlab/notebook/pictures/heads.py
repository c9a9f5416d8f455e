"""Pictures of attention: the owners of the columns of Q, K and V, and the attention weights of each head."""
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from shardlab.notebook.pictures.shards import color_of, rank_colors
from shardlab.report.drawing import Picture, draw_box, draw_legend, hide_frame, name_rows, one_panel

FUTURE = "#F0F0F0"      # what a position may not see


def draw_qkv(ways: Mapping[str, np.ndarray], a: int) -> Picture:
    """Draw the columns of the fused matrix [h, 3h] for each way to split it: owners [3, a], a rank for each head."""
    figure, axes = one_panel(9, 0.62 * len(ways) + 0.95, xlim=(-0.1, 3 * a + 0.1), xticks=[])
    for y, owners in enumerate(ways.values()):
        for part, head in np.ndindex(owners.shape):
            draw_box(axes, part * a + head + 0.03, y - 0.32, 0.94, 0.64, color_of(owners[part, head]),
                     f"{'QKV'[part]}{head}")
        for part in (1, 2):
            axes.plot([part * a] * 2, [y - 0.45, y + 0.45], color="black", linewidth=1.5)
    for part, name in enumerate(("queries", "keys", "values")):
        axes.text((part + 0.5) * a, -0.5, name, ha="center", va="bottom", fontsize=9)
    name_rows(axes, list(ways), 0)
    hide_frame(axes)
    draw_legend(figure, rank_colors(rank for owners in ways.values() for rank in owners.flat))
    said = (f"{name}: " + ", ".join(f"{'QKV'[part]}{head} on rank {owners[part, head]}" for part, head in
            np.ndindex(owners.shape)) for name, owners in ways.items())
    figure.set_label(f"Who owns the columns of queries, keys and values, head by head. {'; '.join(said)}.")
    return figure


def draw_patterns(probs: np.ndarray, owners: Sequence[int], text: Sequence[str], titles: Sequence[str]) -> Picture:
    """Draw probs [a, s, s], the attention weights of each position (a row), each head in its owner's colour."""
    a, s, _ = probs.shape
    figure = Picture((2.1 * a + 0.6, 3.05), layout="constrained")
    for head, axes in enumerate(figure.subplots(1, a, sharey=True, squeeze=False).flat):
        shades = LinearSegmentedColormap.from_list("", ["white", color_of(owners[head])]).with_extremes(bad=FUTURE)
        hidden = np.triu(np.ones((s, s), bool), 1)
        axes.imshow(np.ma.masked_array(probs[head], hidden), cmap=shades, vmin=0, vmax=1)
        axes.set_title(f"head {head}\n{titles[head]}", fontsize=9)
        axes.set_xticks(range(s), text, rotation=90)
        axes.set_yticks(range(s), text)
        axes.tick_params(length=0, labelsize=8)
        axes.spines[:].set_color("#B0B0B0")
    draw_legend(figure, rank_colors(owners))
    said = (f"head {head} of rank {owners[head]} ({titles[head]}): " + ", ".join(
        f"{token} to {text[int(probs[head, i].argmax())]}" for i, token in enumerate(text)) for head in range(a))
    figure.set_label(f"Attention weights, a row for each position. The largest of each row: {'; '.join(said)}.")
    return figure
