"""A picture of what t ranks of a stage send to those of the next: each all of it, or each its own piece."""
from shardlab.notebook.pictures.shards import color_of
from shardlab.report.drawing import SMALL, Picture, described, draw_cells, whole_axes, write

WIDE, HIGH, DOWN = 0.3, 0.26, 0.5       # inches: of a piece; from one rank to the next
COLUMNS = 0.8, 3.4, 6.0                 # inches from the left: sent, received, gathered
EMPTY = "#F4F4F4"


def draw_crossing(t: int, scattered: bool) -> Picture:
    """Draw the array of b s h numbers in t pieces on each rank of a stage, what crosses, and what arrives.

    A piece has the colour of the rank that sends it if it is scattered. What crosses is dark, what is empty is pale.
    """
    figure, axes = whole_axes(COLUMNS[2 if scattered else 1] + WIDE * t + 0.3, DOWN * t + 0.75)
    everything = [color_of(piece) for piece in range(t)]
    for rank in range(t):
        top = 0.6 + DOWN * rank
        own = [color if piece == rank else EMPTY for piece, color in enumerate(everything)]
        draw_array(axes, COLUMNS[0], top, everything, f"rank {rank}")
        draw_arrow(axes, COLUMNS[0] + WIDE * t, COLUMNS[1] - 0.62, top, f"b s h{f' / {t}' if scattered else ''}")
        draw_array(axes, COLUMNS[1], top, own if scattered else everything, f"rank {t + rank}")
        if scattered:
            draw_arrow(axes, COLUMNS[1] + WIDE * t, COLUMNS[2] - 0.05, top, "all-gather", ":")
            draw_array(axes, COLUMNS[2], top, everything)
    title = ("scattered, then gathered: the array crosses once" if scattered else
             f"whole: the same array crosses {t} times")
    write(axes, COLUMNS[0], 0.25, title, "right", 10)
    return described(figure, f"Each of {t} ranks of a stage holds the same {t} pieces, and sends "
                     f"{'its own piece' if scattered else 'all of them'} to one rank of the next stage; {title}")


def draw_array(axes, left: float, top: float, colors: list[str], name: str = "") -> None:
    draw_cells(axes, left, top, [colors], WIDE, HIGH, edgecolor="white")
    write(axes, left - 0.08, top + HIGH / 2, name, "left", SMALL)


def draw_arrow(axes, start: float, end: float, top: float, label: str, line: str = "-") -> None:
    """Draw an arrow, solid between servers and dotted inside one."""
    middle = top + HIGH / 2
    axes.annotate("", (end, middle), (start + 0.05, middle), arrowprops={"arrowstyle": "->", "linestyle": line})
    write(axes, (start + end) / 2, middle - 0.06, label, "above", SMALL)
