"""The common parts of pictures: figures, panels, boxes with labels, texts, rows with names, legends."""
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.typing import ColorType

BIG, SMALL = 9, 8       # points, of letters
PALE = "#A0A0A0"        # letters where nothing is
EMPTY = 0.95            # the brightness of a box in which nothing is
PLACES = {"center": ("center", "center"), "above": ("center", "bottom"), "below": ("center", "top"),
          "left": ("right", "center"), "right": ("left", "center")}     # of a text, seen from its point


class Picture(Figure):
    """A figure. Its label says what it shows, for readers who cannot see it; a notebook stores it with the picture."""

    def _repr_mimebundle_(self, include=None, exclude=None):
        """Return the metadata of the PNG that Jupyter makes."""
        words = " ".join(str(self.get_label()).replace("$", "").split())
        return {}, {"image/png": {"alt": words[0].upper() + words[1:] if words[1:2].isalpha() else words}}


def described(figure: Picture, words: str, parts: Iterable[str] = ()) -> Picture:
    """Return the figure with a label: the words, and a list of parts."""
    figure.set_label(f"{words}{'; '.join(parts)}.")
    return figure


def one_panel(width: float, height: float, **settings: Any):
    """Return a figure of this size in inches, and its axes."""
    figure = Picture((width, height), layout="constrained")
    return figure, figure.add_subplot(**settings)


def several_panels(width: float, height: float, rows: int = 1, columns: int = 1, **settings: Any):
    """Return a figure of this size in inches, and the axes of its panels in a list, row by row."""
    figure = Picture((width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **settings).flat)


def whole_axes(width: float, height: float):
    """Return a figure, and invisible axes that fill it, in inches from its upper left corner."""
    figure = Picture((width, height))
    axes = figure.add_axes((0, 0, 1, 1), aspect="equal", xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def draw_box(axes, x: float, y: float, width: float, height: float, color: ColorType, label: str = "",
             size: float = BIG, **style: Any) -> None:
    """Draw a box, and in its middle a label that can be read on its color; where that is white, the label is pale."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, **style))
    if label:
        axes.text(x + width / 2, y + height / 2, label, ha="center", va="center_baseline", fontsize=size,
                  color="white" if not is_light(color) else "black" if brightness(color) < EMPTY else PALE)


def draw_cells(axes, x: float, y: float, colors: Sequence[Sequence[ColorType]], width: float, height: float,
               labels: Any = "", size: float = BIG, **style: Any) -> None:
    """Draw a matrix of boxes, row by row, from its upper left corner. `labels` are strings, one for each or for all."""
    labels = np.broadcast_to(labels, (len(colors), len(colors[0])))
    for row, own in enumerate(colors):
        for column, color in enumerate(own):
            draw_box(axes, x + column * width, y + row * height, width, height, color, str(labels[row, column]), size,
                     **style)


def paint(axes, colors: np.ndarray, title: str) -> None:
    """Paint a matrix of colors [rows, columns, 3]."""
    axes.imshow(colors, interpolation="nearest")
    axes.set_title(title, fontsize=BIG)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color(PALE)


def write(axes, x: float, y: float, text: str, place: str = "center", size: float = BIG, **style: Any) -> None:
    """Write a text at one of the PLACES around a point."""
    across, down = PLACES[place]
    axes.text(x, y, text, **{"ha": across, "va": down, "fontsize": size} | style)


def is_light(color: ColorType) -> bool:
    return brightness(color) > 0.5


def brightness(color: ColorType) -> float:
    red, green, blue = to_rgb(color)
    return 0.3 * red + 0.59 * green + 0.11 * blue


def name_rows(axes, names: Sequence[object], middle: float = 0.5) -> None:
    """Name the rows of a picture, the first on top. `middle` is the height of the first row's middle."""
    axes.set(yticks=[row + middle for row in range(len(names))], yticklabels=names,
             ylim=(len(names) - 0.5 + middle, middle - 0.5))


def hide_frame(axes, size: float = BIG, below: bool = False) -> None:
    """Hide the lines of axes and their ticks, but not the labels. With `below` the line below keeps both."""
    axes.tick_params(axis="y" if below else "both", length=0)
    axes.tick_params(labelsize=size)
    axes.spines[["left", "top", "right"] if below else ["left", "top", "right", "bottom"]].set_visible(False)


def draw_legend(figure, entries: Mapping[str, str | Mapping[str, Any]], loc: str = "outside lower left",
                **options: Any) -> None:
    """Draw a legend in one line: for each name a color, or other settings of a patch."""
    patches = [Patch(label=name, **({"color": style} if isinstance(style, str) else style))
               for name, style in entries.items()]
    figure.legend(handles=patches, loc=loc, **{"ncols": len(patches), "frameon": False, "fontsize": SMALL,
                                               "handlelength": 1.2, "columnspacing": 1.2, **options})
