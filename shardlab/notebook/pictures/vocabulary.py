"""Pictures of arrays that are sharded by vocabulary: which rank has which token of a text, and numbers for every token.
"""
from collections.abc import Mapping, Sequence

import numpy as np

from shardlab.notebook.pictures.shards import color_of, owners_of, rank_colors
from shardlab.report.charts import finish
from shardlab.report.drawing import Picture, draw_box, draw_legend, hide_frame

NOTHING = "#F4F4F4"     # a rank's result for a token that it does not hold: zeros


def draw_lookup(text: Sequence[str], owners: Sequence[int], t: int) -> Picture:
    """Draw a row for each of t ranks: the tokens of the text that it holds, and 0 for the others; below, their sum."""
    figure = Picture((max(0.62 * len(text) + 1.0, 5.0), 0.34 * (t + 1) + 0.55))
    axes = figure.add_axes((0.09, 0.03, 0.9, 0.8), xlim=(0, len(text)), ylim=(t + 1.15, 0))
    for i, (token, owner) in enumerate(zip(text, owners)):
        for row in (*range(t), t + 0.15):
            found = row in (owner, t + 0.15)
            draw_box(axes, i + 0.03, row + 0.06, 0.94, 0.88, color_of(owner) if found else NOTHING,
                     token if found else "0")
        axes.text(i + 0.5, -0.12, token, ha="center", va="bottom", fontsize=9)
    axes.set(xticks=[], yticks=[*(rank + 0.5 for rank in range(t)), t + 0.65],
             yticklabels=[*(f"rank {rank}" for rank in range(t)), "sum"])
    hide_frame(axes)
    said = (f"{token} on rank {owner}" for token, owner in zip(text, owners))
    figure.set_label(f"Rows of the embedding for the tokens {', '.join(said)}. The other ranks have 0 there; the sum "
                     "has each row once.")
    return figure


def draw_vocabulary(panels: Mapping[str, np.ndarray], vocabulary: Sequence[str], t: int, target: int) -> Picture:
    """Draw a bar for every token in its owner's colour, in each panel; the target has a frame.

    If there are more numbers than tokens, the rest is padding, which has a place, but no bar.
    """
    figure = Picture((8.5, 2.7), layout="constrained")
    for (title, values), axes in zip(panels.items(), figure.subplots(1, len(panels), squeeze=False).flat):
        n = len(values)
        for i, owner in enumerate(owners_of(n, t)[:len(vocabulary)]):
            axes.bar(i, values[i], 0.8, color=color_of(owner), edgecolor="black" if i == target else color_of(owner),
                     linewidth=2.0 if i == target else 0.0)
        if n > len(vocabulary):
            axes.axvspan(len(vocabulary) - 0.5, n - 0.5, facecolor=NOTHING, edgecolor="#C8C8C8", hatch="///",
                         linewidth=0)
        axes.axhline(0, color="#505050", linewidth=0.8)
        axes.set_xlim(-0.6, n - 0.4)
        finish(axes, "", title, "y")
        axes.set_xticks(range(n), [*vocabulary, *["(padding)"] * (n - len(vocabulary))], rotation=45, ha="right")
    draw_legend(figure, {**rank_colors(range(t)),
                         "the target": {"facecolor": "white", "edgecolor": "black", "linewidth": 1.5}})
    said = (f"{title}: {', '.join(f'{token} {value:.2g}' for token, value in zip(vocabulary, values))}"
            for title, values in panels.items())
    figure.set_label(f"Bars for the tokens, sharded over {t} ranks. The target is {vocabulary[target]}. "
                     f"{'; '.join(said)}.")
    return figure
