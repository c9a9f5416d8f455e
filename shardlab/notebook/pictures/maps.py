"""Pictures of linear maps between ranks, as matrices: the inputs of each output, and their owners."""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardlab.notebook.pictures.shards import EVERYONE, WHOLE, color_of, rank_colors
from shardlab.report.drawing import SMALL, Picture, described, draw_cells, draw_legend, whole_axes, write

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


def draw_maps(maps: Sequence[Map], title: str) -> Picture:
    """Draw matrices side by side. A nonzero element has its owner's colour, on the side that has more elements."""
    width = GAP * (len(maps) + 1) + sum(STRIP + CELL * len(m.into) for m in maps)
    height = max(CELL * len(m.out) for m in maps) + STRIP + 2 * MARGIN + 0.6
    figure, axes = whole_axes(max(width, 5.0), height)
    left, middle = GAP, (height - 0.3) / 2 + 0.2
    for m in maps:
        draw_map(axes, m, left, middle - CELL * len(m.out) / 2)
        left += STRIP + CELL * len(m.into) + GAP
    write(axes, 0.15, 0.2, title, "right", 11)
    draw_legend(figure, rank_colors(owner for m in maps for owner in (*m.out, *m.into)), "lower left")
    return described(figure, f"{title}, as matrices. ", (
        f"{m.name} of {len(m.out)} rows: {', '.join(' '.join(f'{x:g}' for x in row) for row in m.matrix)}"
        for m in maps))


def draw_map(axes, m: Map, left: float, top: float) -> None:
    """Draw the matrix, a strip above it with the owner of each column, and one to its left for the rows."""
    (rows, columns), x = m.matrix.shape, left + STRIP + 0.04
    owners = np.broadcast_to(m.out[:, None] if rows >= columns else m.into, m.matrix.shape)
    colors = [[color_of(owner) if value else "white" for owner, value in zip(*both)] for both in zip(owners, m.matrix)]
    draw_cells(axes, left, top, [[color_of(owner)] for owner in m.out], STRIP, CELL, edgecolor="white")
    draw_cells(axes, x, top - STRIP - 0.04, [[color_of(owner) for owner in m.into]], CELL, STRIP, edgecolor="white")
    draw_cells(axes, x, top, colors, CELL, CELL, [[f"{value:g}" for value in row] for row in m.matrix], size=SMALL,
               edgecolor=WHOLE, linewidth=0.6)
    write(axes, x + CELL * columns / 2, top - STRIP - 0.12, m.name, "above", 11)
    write(axes, x + CELL * columns / 2, top + CELL * rows + 0.08, f"[{rows}, {columns}]", "below", SMALL,
          color="#505050")
