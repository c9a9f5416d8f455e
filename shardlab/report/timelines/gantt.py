"""The picture of timelines: a row for each rank, a cell for each action, hatched grey for idle time."""
from collections.abc import Sequence
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle

from mpi_impl.comm.trace import Slice
from mpi_impl.runtime.pictures import save
from reference.schedules.actions import KINDS
from shardlab.report.charts import COLORS, WORDS
from shardlab.report.drawing import Picture, is_light
from shardlab.report.timelines.timelines import timeline_of

PALEST = 0.5                                            # of white, in the colour of a rank's last stage
IDLE: dict[str, Any] = {"facecolor": "#F5F5F5", "edgecolor": "#C8C8C8", "hatch": "////", "linewidth": 0}

LEFT, RIGHT, TITLE, AXIS, LEGEND = 0.75, 0.25, 0.42, 0.55, 0.3        # inches around the cells
NARROWEST, WIDEST, HIGHEST, TALLEST_ROW = 10, 24, 10, 0.4             # inches of a panel, of all panels, of a row
SMALLEST, WANTED, LARGEST = 4.0, 7.0, 9.0                             # points, of the letters in cells
DPI = 150
DIGIT, MARGIN = 0.64, 0.35                                            # of a letter's height: its width, and around it
ROUNDING = 1e-9                                                       # of a panel's span: equal boxes differ by less


class Panel(NamedTuple):
    """One timeline of a picture."""

    name: str                          # 'measured', '1f1b', ...
    ranks: Sequence[Sequence[Slice]]


class Cell(NamedTuple):
    """A rectangle of a panel: time to the right, ranks downwards."""

    start: float       # since the panel's first start
    end: float
    top: float         # rank r's row is from r to r + 1
    bottom: float
    color: str
    label: str         # '' for none


def draw_timelines(path: str, panels: Sequence[Panel], seconds: bool = True) -> None:
    """Draw panels above one another with one time axis, and save the picture. Raise UserError if that fails."""
    save(timelines_figure(panels, seconds), path, DPI)


def timelines_figure(panels: Sequence[Panel], seconds: bool = True) -> Picture:
    """Draw panels above one another with one time axis: in ms if times are `seconds`, else without a unit."""
    scale = 1e3 if seconds else 1.0
    cells = [cells_of(panel.ranks, scale) for panel in panels]
    rows = [len(panel.ranks) for panel in panels]
    span = max(cell.end for own in cells for cell in own)
    letter = time_of_a_letter(cells)
    width = float(np.clip(span / letter * WANTED / 72, NARROWEST, WIDEST))
    row = min(TALLEST_ROW, HIGHEST / sum(rows))
    across, down = 72 * width / span, 72 * row                           # points: of a unit of time, of a row
    size = float(np.clip(letter * across, SMALLEST, LARGEST))
    figure, all_axes = empty_panels(rows, row, width, span)
    for axes, panel, own in zip(all_axes, panels, cells):
        draw_cells(axes, own, across)
        draw_labels(axes, own, size, across, down)
        axes.set_title(title(panel, scale, "ms" if seconds else ""), loc="left", fontsize=11)
    all_axes[-1].set_xlabel("time (ms)" if seconds else "time")
    draw_legend(figure, panels)
    said = (axes.get_title(loc="left") + "".join(
        f", rank {rank}: {' '.join(s.name for s in slices if s.stream == 'compute')}"
        for rank, slices in enumerate(panel.ranks)) for axes, panel in zip(all_axes, panels))
    figure.set_label(f"Timelines, a row for each rank, with its actions in their order. {'; '.join(said)}.")
    return figure


# ---- from slices to cells -------------------------------------------------------------------------------------------


def cells_of(ranks: Sequence[Sequence[Slice]], scale: float = 1.0) -> list[Cell]:
    """Place each slice. Streams other than 'compute' get a strip below it, in all rows if there are any."""
    first = min(s.start for slices in ranks for s in slices)
    bottom = 0.68 if any(s.stream != "compute" for slices in ranks for s in slices) else 0.94
    cells = []
    for r, slices in enumerate(ranks):
        actions = {s.name: s.action for s in slices if s.action}
        stages = sorted({action.stage for action in actions.values()})
        shades = {(kind, stage): shade(COLORS[kind], i, len(stages)) for i, stage in enumerate(stages)
                  for kind in KINDS}
        for s in slices:
            action = actions.get(s.name)
            color = shades[s.kind, action.stage] if action else COLORS[s.kind]
            lane, label = (0.06, bottom), str(action.microbatch) if action else s.name
            if s.stream != "compute":
                lane, label = (bottom + 0.04, 0.94), ""
            cells.append(Cell((s.start - first) * scale, (s.end - first) * scale, r + lane[0], r + lane[1], color,
                              label))
    return cells


def shade(color: str, i: int, n: int) -> str:
    """Return the colour for stage i of a rank's n: the first is full, the last the palest."""
    white = PALEST * i / max(1, n - 1)
    red, green, blue = (white + (1 - white) * part for part in to_rgb(color))
    return to_hex((red, green, blue))


# ---- sizes ----------------------------------------------------------------------------------------------------------


def time_of_a_letter(cells: list[list[Cell]]) -> float:
    """Return the time as wide as a letter is high, such that the numbers just fit into nearly all cells."""
    times = [(cell.end - cell.start) / label_widths(cell.label) for own in cells for cell in own
             if cell.label.isdigit()]
    return float(np.quantile(times, 0.1)) if times else inf


def label_widths(label: str) -> float:
    """Return the width that a cell needs for its label, as a multiple of the letters' height."""
    return DIGIT * len(label) + MARGIN


# ---- drawing --------------------------------------------------------------------------------------------------------


def empty_panels(rows: list[int], row: float, width: float, span: float):
    """Make a figure, and axes for panels with these numbers of rows, the first on top. Sizes are inches."""
    height = sum(rows) * row + len(rows) * TITLE + AXIS + LEGEND
    figure = Picture(figsize=(LEFT + width + RIGHT, height), dpi=DPI)
    every, top, all_axes = ceil(0.18 / row), height, []
    for n in rows:
        top -= TITLE + n * row
        axes = figure.add_axes((LEFT / (LEFT + width + RIGHT), top / height, width / (LEFT + width + RIGHT),
                                n * row / height))
        axes.set(xlim=(0, span), ylim=(n, 0), yticks=[r + 0.5 for r in range(0, n, every)],
                 yticklabels=[f"rank {r}" for r in range(0, n, every)])
        axes.tick_params(left=False, labelsize=9)
        axes.spines[["left", "top", "right"]].set_visible(False)
        all_axes.append(axes)
    for axes in all_axes[:-1]:
        axes.tick_params(labelbottom=False)
    return figure, all_axes


def draw_cells(axes, cells: list[Cell], across: float) -> None:
    """Draw the cells, over the idle time of all ranks from the panel's first start to its last end."""
    n, end = round(axes.get_ylim()[0]), max(cell.end for cell in cells)
    for r in range(n):
        axes.add_patch(Rectangle((0, r + 0.06), end, 0.88, **IDLE))
    corners = [[(c.start, c.top), (c.end, c.top), (c.end, c.bottom), (c.start, c.bottom)] for c in cells]
    gap = min(0.8, 0.06 * across * float(np.median([cell.end - cell.start for cell in cells if cell.label])))
    axes.add_collection(PolyCollection(corners, facecolors=[cell.color for cell in cells], edgecolors="white",
                                       linewidths=[gap if cell.label and gap > 0.1 else 0 for cell in cells]))


def draw_labels(axes, cells: list[Cell], size: float, across: float, down: float) -> None:
    """Draw the labels that fit, in letters of `size` points."""
    slack = ROUNDING * axes.get_xlim()[1]       # letters that just fit into a cell fit into all that are as long
    for cell in cells:
        wide, high = (cell.end - cell.start + slack) * across, (cell.bottom - cell.top) * down
        if cell.label and wide >= size * label_widths(cell.label) and high >= size:
            axes.text((cell.start + cell.end) / 2, (cell.top + cell.bottom) / 2, cell.label, fontsize=size, ha="center",
                      va="center_baseline", color="black" if is_light(cell.color) else "white")


def title(panel: Panel, scale: float, unit: str) -> str:
    """Return the panel's name, and the cost of its pipeline, if it is one."""
    timeline = timeline_of(panel.ranks)
    if not timeline.ranks:
        return panel.name
    return (f"{panel.name}:  makespan {timeline.makespan * scale:.4g}{unit and ' ' + unit},  bubble fraction "
            f"{timeline.bubble_fraction:.4g}")


def draw_legend(figure, panels: Sequence[Panel]) -> None:
    """Explain the colours in use; a kind's shades are side by side."""
    shades: dict[str, int] = {}
    for slices in (slices for panel in panels for slices in panel.ranks):
        for kind in {s.kind for s in slices}:
            stages = {s.action.stage if s.action else 0 for s in slices if s.kind == kind}
            shades[kind] = max(shades.get(kind, 1), len(stages))
    entries = {WORDS[kind]: tuple(Patch(color=shade(color, i, shades[kind])) for i in range(shades[kind]))
               for kind, color in COLORS.items() if kind in shades} | {"idle": (Patch(**IDLE),)}
    if (most := max(shades.values())) > 1:
        entries["first to last stage of a rank"] = tuple(Patch(color=shade("black", i, most)) for i in range(most))
    figure.legend(entries.values(), entries.keys(), loc="lower left", bbox_to_anchor=(LEFT / figure.get_figwidth(), 0),
                  ncols=len(entries), frameon=False, fontsize=9, borderaxespad=0.6, borderpad=0, handlelength=1.6,
                  columnspacing=1.4, handletextpad=0.5, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)})
