"""Figures of papers next to ours, as points in one panel for each table."""
from collections.abc import Sequence
from math import ceil

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

PAPER, OURS, MISSED = "#202020", "#0072B2", "#D55E00"
COLUMNS = 3


def draw_tables(tables: Sequence) -> Figure:
    """Draw circles for the papers' figures and dots for ours; a bar is the tolerance."""
    rows = ceil(len(tables) / COLUMNS)
    figure = Figure((15, 3.9 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS).flatten()
    for axes, table in zip(panels, tables):
        draw_table(axes, table)
    for axes in panels[len(tables):]:
        axes.set_visible(False)
    return figure


def draw_table(axes, table) -> None:
    published, found = ([getattr(row, which) for row in table.rows] for which in ("published", "found"))
    places = range(len(table.rows))
    for x, row in zip(places, table.rows):
        axes.plot([x, x], ends(row), color="#C8C8C8", linewidth=7, solid_capstyle="butt", zorder=1)
    axes.plot(places, published, "o", markersize=9, markerfacecolor="none", markeredgecolor=PAPER, label="paper")
    axes.scatter(places, found, 22, [OURS if row.meets else MISSED for row in table.rows], zorder=3, label="ours")
    axes.set_xticks(places, [row.name.split(" (")[0].replace(", ", "\n") for row in table.rows], fontsize=6.5)
    axes.tick_params(axis="y", labelsize=8)
    if table.unit == "%":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if max(published) > 20 * min(published):
        axes.set_yscale("log")
    elif table.unit != "%" or min(published) > 0.5:
        axes.set_ylim(0, 1.15 * max(*published, *found))
    axes.set_title(table.title.replace(": ", ":\n", 1), loc="left", fontsize=9)
    axes.margins(x=0.08)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="best")


def ends(row) -> tuple[float, float]:
    """Return the ends of the bar: the values at which ours would just be within the tolerance."""
    relative = row.off != row.found - row.published
    reach = row.allowed * (row.published if relative else 1)
    return row.published - reach, row.published + reach
