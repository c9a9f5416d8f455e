"""The bars and curves of the notebooks."""
from collections.abc import Mapping, Sequence

import numpy as np

from shardlab.notebook.pictures.shards import OWNERS
from shardlab.report.charts import finish
from shardlab.report.drawing import Picture, described, draw_legend, name_rows, one_panel, several_panels

DASHES = (), (12, 5), (12, 4, 3, 4), (4, 4)     # points that are drawn and left out: curves differ not by colours alone


def draw_bars(rows: Mapping[str, Mapping[str, float]], xlabel: str, title: str = "",
              colors: Mapping[str, str] | None = None, unit: str = "") -> Picture:
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
    return described(figure, f"Bars, {xlabel}{f' ({title})' if title else ''}: ", (
        f"{name} {sum(parts.values()):,.4g}{unit}" + (
            f" ({', '.join(f'{part} {size:,.3g}' for part, size in parts.items())})" if len(parts) > 1 else "")
        for name, parts in rows.items()))


def draw_curves(curves: Mapping[str, Sequence[float] | np.ndarray], xlabel: str, ylabel: str, title: str = "",
                x: Sequence[float] | None = None, log: str = "") -> Picture:
    """Draw curves in one panel. The first are the widest, so that equal ones are all visible. `log`: 'x', 'y' or 'xy'.
    """
    figure, axes = one_panel(8.5, 3.6)
    for i, (name, values) in enumerate(curves.items()):
        steps = range(1, len(values) + 1) if x is None else x
        width = 1.4 + 2.4 * (len(curves) - 1 - i)
        axes.plot(steps, values, color=OWNERS[i % len(OWNERS)], linewidth=width, label=name, dash_capstyle="butt",
                  linestyle=(0, [length / width for length in DASHES[i % len(DASHES)]]), solid_capstyle="round")
    if "x" in log:
        axes.set_xscale("log", base=2)
    if "y" in log:
        axes.set_yscale("log")
    finish(axes, xlabel, title, "both", ylabel)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=9, handlelength=4)
    return described(figure, f"{title or 'Curves'}: {ylabel} against {xlabel}, which goes from {min(steps):.3g} to "
                     f"{max(steps):.3g}. ", (
        f"{name} goes from {values[0]:.3g} to {values[-1]:.3g}, between {np.nanmin(values):.3g} and "
        f"{np.nanmax(values):.3g}".strip() for name, values in curves.items()))


def draw_loads(runs: Mapping[str, np.ndarray]) -> Picture:
    """Draw a panel for each run [steps, experts]: the share of the tokens that each expert gets, one on the other."""
    figure, panels = several_panels(8.5, 2.6, 1, len(runs), sharey=True)
    words = []
    for axes, (name, loads) in zip(panels, runs.items()):
        axes.stackplot(range(len(loads)), *loads.T, colors=OWNERS)
        axes.margins(0)
        finish(axes, "step", name, "x", "share of the tokens, by expert")
        axes.label_outer()
        first, last = (", ".join(f"{100 * load:.0f}" for load in loads[step]) for step in (0, -1))
        words.append(f"{name}: from {first} to {last}")
    return described(figure, "Shares of the tokens in percent, for expert 0, 1, ..., step by step. ", words)
