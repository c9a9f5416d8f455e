"""Pictures of arrays that are sharded by vocabulary: which rank has which token of a text, and numbers for every token.
"""
from collections.abc import Mapping, Sequence

import numpy as np

from shardlab.notebook.pictures.shards import color_of, owners_of, rank_colors
from shardlab.report.charts import finish
from shardlab.report.drawing import Picture, described, draw_box, draw_legend, hide_frame, several_panels, write

NOTHING = "#F4F4F4"     # a rank's result for a token that it does not hold: zeros


def draw_lookup(text: Sequence[str], owners: Sequence[int], t: int) -> Picture:
    """Draw a row for each of t ranks: the tokens of the text that it holds, and 0 for the others; below, their sum."""
    figure, rows = Picture((max(0.62 * len(text) + 1.0, 5.0), 0.34 * (t + 1) + 0.55)), [*range(t), t + 0.15]
    axes = figure.add_axes((0.09, 0.03, 0.9, 0.8), xlim=(0, len(text)), ylim=(t + 1.15, 0))
    for i, (token, owner) in enumerate(zip(text, owners)):
        for row in rows:
            held = row in (owner, rows[-1])
            draw_box(axes, i + 0.03, row + 0.06, 0.94, 0.88, color_of(owner) if held else NOTHING,
                     token if held else "0")
        write(axes, i + 0.5, -0.12, token, "above")
    axes.set(xticks=[], yticks=[row + 0.5 for row in rows], yticklabels=[*(f"rank {rank}" for rank in range(t)), "sum"])
    hide_frame(axes)
    held_by = ", ".join(f"{token} on rank {owner}" for token, owner in zip(text, owners))
    return described(figure, f"Rows of the embedding for the tokens {held_by}. The other ranks have 0 there; the sum "
                     "has each row once")


def draw_vocabulary(panels: Mapping[str, np.ndarray], vocabulary: Sequence[str], t: int, target: int) -> Picture:
    """Draw a bar for every token in its owner's colour, in each panel; the target has a frame.

    If there are more numbers than tokens, the rest is padding, which has a place, but no bar.
    """
    figure, all_axes = several_panels(8.5, 2.7, 1, len(panels))
    for axes, (title, values) in zip(all_axes, panels.items()):
        n, tokens = len(values), len(vocabulary)
        for i, owner in enumerate(owners_of(n, t)[:tokens]):
            axes.bar(i, values[i], 0.8, color=color_of(owner), edgecolor="black" if i == target else color_of(owner),
                     linewidth=2.0 if i == target else 0.0)
        if n > tokens:
            axes.axvspan(tokens - 0.5, n - 0.5, facecolor=NOTHING, edgecolor="#C8C8C8", hatch="///", linewidth=0)
        axes.axhline(0, color="#505050", linewidth=0.8)
        axes.set_xlim(-0.6, n - 0.4)
        finish(axes, "", title, "y")
        axes.set_xticks(range(n), [*vocabulary, *["(padding)"] * (n - tokens)], rotation=45, ha="right")
    draw_legend(figure, {**rank_colors(range(t)),
                         "the target": {"facecolor": "white", "edgecolor": "black", "linewidth": 1.5}})
    return described(figure, f"Bars for the tokens, sharded over {t} ranks. The target is {vocabulary[target]}. ", (
        f"{title}: {', '.join(f'{token} {value:.2g}' for token, value in zip(vocabulary, values))}"
        for title, values in panels.items()))
