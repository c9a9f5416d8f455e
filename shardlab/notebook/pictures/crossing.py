"""A picture of what t ranks of a stage send to those of the next: each all of it, or each its own piece."""

from shardlab.notebook.pictures.shards import color_of
from shardlab.report.drawing import Picture, draw_box, whole_axes

WIDE, HIGH, DOWN = 0.3, 0.26, 0.5       # inches: of a piece; from one rank to the next
COLUMNS = 0.8, 3.4, 6.0                 # inches from the left: sent, received, gathered
EMPTY = "#F4F4F4"


def draw_crossing(t: int, scattered: bool) -> Picture:
    """Draw the array of b s h numbers in t pieces on each rank of a stage, what crosses, and what arrives.

    A piece has the colour of the rank that sends it if it is scattered. What crosses is dark, what is empty is pale.
    """
    figure, axes = whole_axes(COLUMNS[2 if scattered else 1] + WIDE * t + 0.3, DOWN * t + 0.75)
    all_pieces = range(t)
    for rank in range(t):
        top = 0.6 + DOWN * rank
        crossing = [rank] if scattered else all_pieces
        draw_array(axes, COLUMNS[0], top, t, all_pieces, f"rank {rank}")
        draw_arrow(axes, COLUMNS[0] + WIDE * t, COLUMNS[1] - 0.62, top, f"b s h{f' / {t}' if scattered else ''}")
        draw_array(axes, COLUMNS[1], top, t, crossing, f"rank {t + rank}")
        if scattered:
            draw_arrow(axes, COLUMNS[1] + WIDE * t, COLUMNS[2] - 0.05, top, "all-gather", solid=False)
            draw_array(axes, COLUMNS[2], top, t, all_pieces)
    title = ("scattered, then gathered: the array crosses once" if scattered else
             f"whole: the same array crosses {t} times")
    axes.text(COLUMNS[0], 0.25, title, fontsize=10, va="center")
    figure.set_label(f"Each of {t} ranks of a stage holds the same {t} pieces, and sends "
                     f"{'its own piece' if scattered else 'all of them'} to one rank of the next stage; {title}.")
    return figure


def draw_array(axes, left: float, top: float, t: int, pieces, name: str = "") -> None:
    """Draw t pieces side by side, those in `pieces` in colour."""
    for piece in range(t):
        draw_box(axes, left + WIDE * piece, top, WIDE, HIGH, color_of(piece) if piece in pieces else EMPTY,
                 edgecolor="white")
    axes.text(left - 0.08, top + HIGH / 2, name, ha="right", va="center", fontsize=8)


def draw_arrow(axes, start: float, end: float, top: float, label: str, solid: bool = True) -> None:
    """Draw an arrow, solid between servers and dotted inside one."""
    middle = top + HIGH / 2
    axes.annotate("", (end, middle), (start + 0.05, middle),
                  arrowprops={"arrowstyle": "->", "linestyle": "-" if solid else ":"})
    axes.text((start + end) / 2, middle - 0.06, label, ha="center", va="bottom", fontsize=8)
