"""A picture of the dispatch: copies of tokens on the ranks that have them, and on those of their experts."""
import numpy as np
from matplotlib.patches import Polygon

from shardlab.notebook.pictures.shards import color_of, rank_colors
from shardlab.report.drawing import SMALL, Picture, described, draw_box, draw_legend, whole_axes, write

COPY, WIDE, APART, FAR = 0.05, 0.45, 0.18, 3.2      # inches: of a copy, of a rank's strip, between ranks, between sides
TOP, BOTTOM = 0.35, 0.35                            # of the title, and of the legend
LEFT, RIGHT = 1.2, 1.2 + WIDE + FAR                 # of the strips


def draw_dispatch(counts: np.ndarray, title: str) -> Picture:
    """Draw how copies travel; counts [ranks, experts] are each rank's. A copy has the colour of the rank it comes from,
    and the strips on the right are the rows of each expert's matrix.
    """
    e, experts = counts.shape
    each = experts // e
    figure, axes = whole_axes(2 * WIDE + FAR + 3.2, TOP + COPY * counts.sum() + APART * (max(e, experts) + 1) + BOTTOM)
    starts, ends = strips(counts.sum(1)).tolist(), strips(counts.sum(0)).tolist()
    for rank, size in enumerate(counts.sum(1)):
        write(axes, LEFT - 0.1, starts[rank] + COPY * size / 2, f"rank {rank}: {size}", "left", SMALL)
    for i, size in enumerate(counts.sum(0)):
        write(axes, RIGHT + WIDE + 0.1, ends[i] + COPY * size / 2, f"expert {i}, on rank {i // each}: {size}", "right",
              SMALL)
    for (rank, expert), copies in np.ndenumerate(counts):
        n, start, end, color = COPY * int(copies), starts[rank], ends[expert], color_of(rank)
        for x, y in (LEFT, start), (RIGHT, end):
            draw_box(axes, x, y, WIDE, n, color, edgecolor="white", linewidth=0.5)
        axes.add_patch(Polygon([(LEFT + WIDE, start), (RIGHT, end), (RIGHT, end + n), (LEFT + WIDE, start + n)],
                               closed=True, facecolor=color, alpha=0.25, linewidth=0))
        starts[rank], ends[expert] = start + n, end + n
    write(axes, LEFT, TOP / 2, title, "right", 11)
    draw_legend(figure, rank_colors(range(e)), "lower right")
    return described(figure, f"{title}: copies of tokens to expert 0, 1, ..., with {each} on a rank. ", (
        f"rank {rank} sends {', '.join(map(str, own))}" for rank, own in enumerate(counts)))


def strips(sizes: np.ndarray) -> np.ndarray:
    """Return where strips of so many copies begin, one below the other."""
    return TOP + APART + np.cumsum(COPY * sizes + APART) - (COPY * sizes + APART)
