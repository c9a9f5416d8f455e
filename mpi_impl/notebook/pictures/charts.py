"""The bars and curves of the notebooks."""
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from mpi_impl.notebook.pictures.shards import OWNERS
from mpi_impl.report.charts import finish
from mpi_impl.report.drawing import draw_legend, name_rows, one_panel


def draw_bars(rows: Mapping[str, Mapping[str, float]], xlabel: str, title: str = "",
              colors: Mapping[str, str] | None = None, unit: str = "") -> Figure:
    """Draw a horizontal bar for each row, made of its parts, with their sum. The name of a part selects its colour."""
    figure, axes = one_panel(8.5, 0.42 * len(rows) + 1.35)
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    colors = colors or dict(zip(names, OWNERS))
    for y, parts in enumerate(rows.values()):
        left = 0.0
        for name, size in parts.items():
            if size:
                axes.barh(y, size, 0.66, left, color=colors[name])
            left += size
        axes.annotate(f"{left:,.4g}{unit}", (left, y), (5, 0), textcoords="offset points", va="center", fontsize=9)
    name_rows(axes, list(rows), 0)
    axes.margins(x=0.12)
    finish(axes, xlabel, title, "x")
    if len(names) > 1:
        draw_legend(figure, {name: colors[name] for name in names}, fontsize=9)
    return figure


def draw_curves(curves: Mapping[str, Sequence[float] | np.ndarray], xlabel: str, ylabel: str, title: str = "",
                x: Sequence[float] | None = None, log: str = "") -> Figure:
    """Draw curves in one panel. The first are the widest, so that equal ones are all visible. `log`: 'x', 'y' or 'xy'.
    """
    figure, axes = one_panel(8.5, 3.6)
    for i, (name, values) in enumerate(curves.items()):
        steps = range(1, len(values) + 1) if x is None else x
        axes.plot(steps, values, color=OWNERS[i % len(OWNERS)], linewidth=1.4 + 2.4 * (len(curves) - 1 - i),
                  label=name, solid_capstyle="round")
    if "x" in log:
        axes.set_xscale("log", base=2)
    if "y" in log:
        axes.set_yscale("log")
    finish(axes, xlabel, title, "both", ylabel)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=9)
    return figure


def draw_loads(runs: Mapping[str, np.ndarray]) -> Figure:
    """Draw a panel for each run [steps, experts]: the share of the tokens that each expert gets, one on the other."""
    figure = Figure((8.5, 2.6), layout="constrained")
    for axes, (name, loads) in zip(figure.subplots(1, len(runs), sharey=True), runs.items()):
        axes.stackplot(range(len(loads)), *loads.T, colors=OWNERS)
        axes.margins(0)
        finish(axes, "step", name, "x", "share of the tokens, by expert")
        axes.label_outer()
    return figure
