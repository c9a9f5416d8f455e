"""Pictures of attention: the owners of the columns of Q, K and V, and the attention weights of each head."""
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from shardlab.notebook.pictures.shards import color_of, rank_colors
from shardlab.report.drawing import (SMALL, Picture, described, draw_box, draw_legend, hide_frame, name_rows, one_panel,
                                     several_panels, write)

FUTURE = "#F0F0F0"      # what a position may not see


def draw_qkv(ways: Mapping[str, np.ndarray], a: int) -> Picture:
    """Draw the columns of the fused matrix [h, 3h] for each way to split it: owners [3, a], a rank for each head."""
    figure, axes = one_panel(9, 0.62 * len(ways) + 0.95, xlim=(-0.1, 3 * a + 0.1), xticks=[])
    words = []
    for y, (name, owners) in enumerate(ways.items()):
        labels = [f"{part}{head}" for part in "QKV" for head in range(a)]
        for i, (label, owner) in enumerate(zip(labels, owners.flat)):
            draw_box(axes, i + 0.03, y - 0.32, 0.94, 0.64, color_of(owner), label)
        for part in (1, 2):
            axes.plot([part * a] * 2, [y - 0.45, y + 0.45], color="black", linewidth=1.5)
        words.append(f"{name}: " + ", ".join(f"{label} on rank {owner}" for label, owner in zip(labels, owners.flat)))
    for part, name in enumerate(("queries", "keys", "values")):
        write(axes, (part + 0.5) * a, -0.5, name, "above")
    name_rows(axes, list(ways), 0)
    hide_frame(axes)
    draw_legend(figure, rank_colors(rank for owners in ways.values() for rank in owners.flat))
    return described(figure, "Who owns the columns of queries, keys and values, head by head. ", words)


def draw_patterns(probs: np.ndarray, owners: Sequence[int], text: Sequence[str], titles: Sequence[str]) -> Picture:
    """Draw probs [a, s, s], the attention weights of each position (a row), each head in its owner's colour."""
    a, s, _ = probs.shape
    figure, panels = several_panels(2.1 * a + 0.6, 3.05, 1, a, sharey=True)
    words = []
    for head, (axes, weights, owner, title) in enumerate(zip(panels, probs, owners, titles)):
        shades = LinearSegmentedColormap.from_list("", ["white", color_of(owner)]).with_extremes(bad=FUTURE)
        axes.imshow(np.ma.masked_array(weights, ~np.tri(s, dtype=bool)), cmap=shades, vmin=0, vmax=1)
        axes.set_title(f"head {head}\n{title}", fontsize=9)
        axes.set_xticks(range(s), text, rotation=90)
        axes.set_yticks(range(s), text)
        axes.tick_params(length=0, labelsize=SMALL)
        axes.spines[:].set_color("#B0B0B0")
        largest = (f"{token} to {text[row.argmax()]}" for token, row in zip(text, weights))
        words.append(f"head {head} of rank {owner} ({title}): {', '.join(largest)}")
    draw_legend(figure, rank_colors(owners))
    return described(figure, "Attention weights, a row for each position. The largest of each row: ", words)
