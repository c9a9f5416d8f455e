"""A picture of the dispatch: copies of tokens on the ranks that have them, and on those of their experts."""
from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Polygon

from shardlab.notebook.pictures.shards import color_of, rank_colors
from shardlab.report.drawing import Picture, draw_box, draw_legend, whole_axes

COPY, WIDE, APART, FAR = 0.05, 0.45, 0.18, 3.2      # inches: of a copy, of a rank's strip, between ranks, between sides
TOP, BOTTOM = 0.35, 0.35                            # of the title, and of the legend


def draw_dispatch(counts: np.ndarray, title: str = "") -> Picture:
    """Draw how copies travel; counts [ranks, experts] are each rank's. A copy has the colour of the rank it comes from,
    and the strips on the right are the rows of each expert's matrix.
    """
    e, experts = counts.shape
    each = experts // e
    height = TOP + COPY * counts.sum() + APART * (max(e, experts) + 1) + BOTTOM
    figure, axes = whole_axes(2 * WIDE + FAR + 3.2, height)
    left, right = 1.2, 1.2 + WIDE + FAR
    starts = strips(axes, [int(own.sum()) for own in counts], left, [f"rank {rank}" for rank in range(e)], -0.1)
    ends = strips(axes, [int(load) for load in counts.sum(0)], right,
                  [f"expert {i}, on rank {i // each}" for i in range(experts)], WIDE + 0.1)
    for rank in range(e):
        for expert in range(experts):
            n = COPY * int(counts[rank, expert])
            band(axes, left, starts[rank], right, ends[expert], n, color_of(rank))
            starts[rank], ends[expert] = starts[rank] + n, ends[expert] + n
    if title:
        axes.text(left, TOP / 2, title, fontsize=11, va="center")
    draw_legend(figure, rank_colors(range(e)), "lower right")
    said = (f"rank {rank} sends {', '.join(map(str, own))}" for rank, own in enumerate(counts))
    figure.set_label(f"{title}: copies of tokens to expert 0, 1, ..., with {each} on a rank. {'; '.join(said)}.")
    return figure


def strips(axes, sizes: Sequence[int], x: float, names: Sequence[str], beside: float) -> list[float]:
    """Write the names of strips of these sizes, one below the other; return where each begins."""
    found, y = [], TOP + APART
    for size, name in zip(sizes, names):
        found.append(y)
        axes.text(x + beside, y + COPY * size / 2, f"{name}: {size}", fontsize=8, va="center",
                  ha="right" if beside < 0 else "left")
        y += COPY * size + APART
    return found


def band(axes, left: float, start: float, right: float, end: float, n: float, color: str) -> None:
    """Draw copies on both sides, and their way."""
    for x, y in ((left, start), (right, end)):
        draw_box(axes, x, y, WIDE, n, color, edgecolor="white", linewidth=0.5)
    inner, outer = left + WIDE, right
    axes.add_patch(Polygon([(inner, start), (outer, end), (outer, end + n), (inner, start + n)], closed=True,
                           facecolor=color, alpha=0.25, linewidth=0))
