"""Pictures of matrices, coloured by the rank that owns each part; and the colours of ranks in all pictures."""
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardlab.report.drawing import SMALL, Picture, described, draw_box, draw_legend, whole_axes, write

# Near those of Okabe and Ito: people who are blind to red or green can tell them apart.
OWNERS = ("#0072B2", "#EE7733", "#008F6B", "#CC79A7", "#F0C842", "#56B4E9", "#AA4422", "#888888")
EVERYONE, EACH = -1, -2     # in place of an owner: all ranks hold the same; every rank holds a summand of its own
WHOLE = "#E8E8E8"           # what all ranks hold

CELL, GAP, SHEET = 0.16, 0.32, 0.07     # inches: of an element, between two matrices, between a partial sum's sheets
LONGEST = 28                            # cells: longer sides are drawn shorter
NUMBERED = 0.12                         # inches that a part must have for its owner's number


class Matrix(NamedTuple):
    """A matrix, and the owners of its elements."""

    name: str            # 'A', 'X A', ...
    owners: np.ndarray   # [rows, columns] of ranks, or EVERYONE, or EACH
    note: str = ""       # below it


def whole(name: str, rows: int, columns: int, note: str = "") -> Matrix:
    """Return a matrix that every rank holds."""
    return Matrix(name, np.full((rows, columns), EVERYONE), note)


def by_columns(name: str, rows: int, columns: int, t: int, note: str = "") -> Matrix:
    """Return a matrix sharded by columns; if they do not divide, the first ranks have one more."""
    return Matrix(name, np.tile(owners_of(columns, t), (rows, 1)), note)


def by_rows(name: str, rows: int, columns: int, t: int, note: str = "") -> Matrix:
    return Matrix(name, np.tile(owners_of(rows, t)[:, None], (1, columns)), note)


def partial_sums(name: str, rows: int, columns: int, note: str = "") -> Matrix:
    """Return a matrix of which every rank has a summand of full size."""
    return Matrix(name, np.full((rows, columns), EACH), note)


def owners_of(n: int, t: int) -> np.ndarray:
    """Return the owners [n] of n items: 0 0 0 1 1 1 2 2 for n = 8, t = 3."""
    return np.concatenate([np.full(len(part), rank) for rank, part in enumerate(np.array_split(np.arange(n), t))])


def draw_matrices(items: Sequence[Matrix | str], t: int, title: str) -> Picture:
    """Draw matrices side by side, with signs ('x', '=', 'GeLU') between them as in a formula; t ranks."""
    sizes = [drawn_size(item, t) for item in items]
    height = max(h for _, h in sizes) + 1.35
    figure, axes = whole_axes(sum(w for w, _ in sizes) + GAP * (len(items) + 1), height)
    left, middle = GAP, (height - 0.35) / 2 + 0.12
    owners, words = set[int](), []
    for item, (w, h) in zip(items, sizes):
        if isinstance(item, str):
            write(axes, left + w / 2, middle, item, size=13)
            words.append(item)
        else:
            draw_matrix(axes, item, left, middle - h / 2, w, h, t)
            owners |= {*range(t)} if is_partial(item) else {*item.owners.flat}
            words.append(describe_matrix(item))
        left += w + GAP
    write(axes, GAP, 0.2, title, "right", 11)
    draw_legend(figure, rank_colors(map(int, owners)), "lower left")
    return described(figure, f"{title}: {' '.join(words)}")


def is_partial(matrix: Matrix) -> bool:
    """Report whether every rank has a summand of full size."""
    return bool((matrix.owners == EACH).all())


def drawn_size(item: Matrix | str, t: int) -> tuple[float, float]:
    """Return width and height in inches."""
    if isinstance(item, str):
        return 0.11 * len(item), 0.2
    rows, columns = item.owners.shape
    sheets = SHEET * (t - 1) * is_partial(item)
    return min(columns, LONGEST) * CELL + sheets, min(rows, LONGEST) * CELL + sheets


def draw_matrix(axes, matrix: Matrix, left: float, top: float, width: float, height: float, t: int) -> None:
    """Draw a rectangle for each owner's part; partial sums as sheets behind one another, one for each rank."""
    rows, columns = matrix.owners.shape
    if is_partial(matrix):
        behind = SHEET * (t - 1)
        for rank in reversed(range(t)):
            draw_box(axes, left + SHEET * rank, top + SHEET * rank, width - behind, height - behind, color_of(rank),
                     edgecolor="white", linewidth=1)
    else:
        for r, c, n, m in stretches(matrix.owners):
            owner, wide, high = int(matrix.owners[r, c]), m / columns * width, n / rows * height
            numbered = owner != EVERYONE and min(wide, high) > NUMBERED      # colours are hard to tell apart in grey
            draw_box(axes, left + c / columns * width, top + r / rows * height, wide, high, color_of(owner),
                     f"{owner}" if numbered else "", 7, edgecolor="white", linewidth=1.5)
    write(axes, left + width / 2, top - 0.1, matrix.name, "above", 11)
    write(axes, left + width / 2, top + height + 0.08, matrix.note or f"[{rows}, {columns}]", "below", SMALL,
          color="#505050")


def describe_matrix(matrix: Matrix) -> str:
    """Return a matrix in words: 'A [4, 8], sharded by columns'."""
    owners, (rows, columns) = matrix.owners, matrix.owners.shape
    held = ("on every rank" if (owners == EVERYONE).all() else "a summand on every rank" if is_partial(matrix) else
            "sharded by columns" if (owners == owners[0]).all() else
            "sharded by rows" if (owners == owners[:, :1]).all() else "sharded by both")
    return f"{matrix.name} [{rows}, {columns}], {held}" + (f" ({matrix.note})" if matrix.note else "")


def stretches(owners: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Return the rectangles of one owner that tile the matrix: (row, column, rows, columns)."""
    def starts(differs) -> list[int]:
        return [0, *(np.flatnonzero(differs) + 1).tolist()]

    rows = starts((owners[1:] != owners[:-1]).any(1))
    columns = starts((owners[:, 1:] != owners[:, :-1]).any(0))
    ends = zip(rows, [*rows[1:], owners.shape[0]])
    return [(r, c, r_end - r, c_end - c) for r, r_end in ends
            for c, c_end in zip(columns, [*columns[1:], owners.shape[1]])]


def color_of(owner) -> str:
    return WHOLE if owner == EVERYONE else OWNERS[owner % len(OWNERS)]


def rank_colors(ranks: Iterable[int]) -> dict[str, str]:
    """Return the entries of a legend for these ranks, each once; EVERYONE is 'every rank', and comes last."""
    return {"every rank" if rank == EVERYONE else f"rank {rank}": color_of(rank)
            for rank in sorted(set(ranks), key=lambda rank: (rank == EVERYONE, rank))}
