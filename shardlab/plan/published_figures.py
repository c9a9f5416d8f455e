"""Figures of papers next to ours, as points in one panel for each table."""
from collections.abc import Sequence
from math import ceil

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from shardlab.plan.published import Share, Table
from shardlab.report.charts import finish

PAPER, OURS, MISSED = "#202020", "#0072B2", "#D55E00"
COLUMNS = 3


def draw_tables(tables: Sequence[Table]) -> Figure:
    """Draw circles for the papers' figures and dots for ours; a bar is the tolerance."""
    rows = ceil(len(tables) / COLUMNS)
    figure = Figure((15, 3.9 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS).flatten()
    for axes, table in zip(panels, tables):
        draw_table(axes, table)
    for axes in panels[len(tables):]:
        axes.set_visible(False)
    return figure


def draw_table(axes, table: Table) -> None:
    published, found = ([getattr(row, which) for row in table.rows] for which in ("published", "found"))
    reach = [row.allowed * (row.published if isinstance(row, Share) else 1) for row in table.rows]
    places = range(len(table.rows))
    axes.errorbar(places, published, reach, fmt="none", ecolor="#C8C8C8", elinewidth=7, zorder=1)
    axes.plot(places, published, "o", markersize=9, markerfacecolor="none", markeredgecolor=PAPER, label="paper")
    axes.scatter(places, found, 22, [OURS if row.meets else MISSED for row in table.rows], zorder=3, label="ours")
    axes.set_xticks(places, [row.name.split(" (")[0].replace(", ", "\n") for row in table.rows])
    if table.unit == "%":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if max(published) > 20 * min(published):
        axes.set_yscale("log")
    elif table.unit != "%" or min(published) > 0.5:
        axes.set_ylim(0, 1.15 * max(*published, *found))
    axes.margins(x=0.08)
    finish(axes, "", table.title.replace(": ", ":\n", 1), "y")
    axes.tick_params(axis="x", labelsize=6.5)
    axes.legend(frameon=False, fontsize=8, loc="best")
