"""Pictures of linear maps between ranks, as matrices: the inputs of each output, and their owners."""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardlab.notebook.pictures.shards import EVERYONE, WHOLE, color_of, rank_colors
from shardlab.report.drawing import Picture, draw_box, draw_legend, whole_axes

CELL, STRIP, GAP, MARGIN = 0.27, 0.1, 1.0, 0.45     # inches: of an element, of an owner's mark, around matrices


class Map(NamedTuple):
    """A linear map y = M x: a row for each output, a column for each input."""

    name: str
    matrix: np.ndarray      # [n out, n in]
    out: np.ndarray         # [n out]: the owner of each number, a rank or EVERYONE
    into: np.ndarray        # [n in]


def replicated(n: int) -> np.ndarray:
    """Return the owners of an array [n] that every rank holds."""
    return np.full(n, EVERYONE)


def draw_maps(maps: Sequence[Map], title: str = "") -> Picture:
    """Draw matrices side by side. A nonzero element has its owner's colour, on the side that has more elements."""
    width = GAP * (len(maps) + 1) + sum(STRIP + CELL * m.matrix.shape[1] for m in maps)
    height = max(CELL * m.matrix.shape[0] for m in maps) + STRIP + 2 * MARGIN + 0.6
    figure, axes = whole_axes(max(width, 5.0), height)
    left, middle = GAP, (height - 0.3) / 2 + 0.2
    for m in maps:
        draw_map(axes, m, left, middle - CELL * m.matrix.shape[0] / 2)
        left += STRIP + CELL * m.matrix.shape[1] + GAP
    if title:
        axes.text(0.15, 0.2, title, fontsize=11, va="center")
    draw_legend(figure, rank_colors(owner for m in maps for owner in (*m.out, *m.into)), "lower left")
    said = (f"{m.name} of {m.matrix.shape[0]} rows: {', '.join(' '.join(f'{x:g}' for x in row) for row in m.matrix)}"
            for m in maps)
    figure.set_label(f"{title or 'Linear maps between ranks'}, as matrices. {'; '.join(said)}.")
    return figure


def draw_map(axes, m: Map, left: float, top: float) -> None:
    """Draw the matrix, a strip above it with the owner of each column, and one to its left for the rows."""
    rows, columns = m.matrix.shape
    x, y = left + STRIP + 0.04, top
    for r in range(rows):
        draw_box(axes, left, y + CELL * r, STRIP, CELL, color_of(m.out[r]), edgecolor="white")
    for c in range(columns):
        draw_box(axes, x + CELL * c, y - STRIP - 0.04, CELL, STRIP, color_of(m.into[c]), edgecolor="white")
    for (r, c), value in np.ndenumerate(m.matrix):
        owner = m.out[r] if rows >= columns else m.into[c]
        draw_box(axes, x + CELL * c, y + CELL * r, CELL, CELL, color_of(owner) if value else "white", f"{value:g}", 8,
                 edgecolor=WHOLE, linewidth=0.6)
    axes.text(x + CELL * columns / 2, y - STRIP - 0.12, m.name, ha="center", va="bottom", fontsize=11)
    axes.text(x + CELL * columns / 2, y + CELL * rows + 0.08, f"[{rows}, {columns}]", ha="center", va="top",
              fontsize=8, color="#505050")
