"""Pictures of many runs, in panels: for each kind the median over its seeds, and a band between the best and the worst.
"""
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

SMOOTHED = 20       # points of a long curve, whose mean is drawn
LONG = 100


class Panel(NamedTuple):
    """A panel: x [points] and y [seeds, points] by the name of a kind. Axes in `log` are logarithmic, with
    ticks at the points of the first kind.
    """

    title: str
    xlabel: str
    bands: dict[str, tuple[np.ndarray, np.ndarray]]
    log: str = ""       # "x", "xy"
    xmax: float | None = None


def draw_panels(path: str, panels: Sequence[Panel], title: str, ylabel: str, levels: Mapping[str, float],
                ylim: tuple[float | None, float | None]) -> None:
    """Draw panels side by side, with dotted lines at the levels."""
    from matplotlib.figure import Figure  # matplotlib takes a second to import

    from mpi_impl.runtime.pictures import save

    figure = Figure(figsize=(max(6.4, 5 * len(panels)), 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for i, (name, (x, y)) in enumerate(panel.bands.items()):
            x, y = smooth(x), np.minimum(smooth(y), 2 * (ylim[1] or np.inf))
            axes.fill_between(x, y.min(0), y.max(0), color=f"C{i}", alpha=0.18, linewidth=0)
            axes.plot(x, np.median(y, 0), color=f"C{i}", linewidth=2, label=name, marker="o" if panel.log else "")
        for name, level in levels.items():
            axes.axhline(level, color="0.5", linestyle=":", linewidth=1)
            axes.text(1, level, name, color="0.4", ha="right", va="bottom", fontsize=9,
                      transform=axes.get_yaxis_transform())
        axes.set(title=panel.title, xlabel=panel.xlabel, ylim=ylim)
        axes.set_xlim(right=panel.xmax)
        if panel.log and panel.bands:
            ticks = next(iter(panel.bands.values()))[0]
            axes.set(xscale="log", yscale="log" if "y" in panel.log else "linear")
            axes.minorticks_off()
            axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
        if panel.bands:
            axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel(ylabel)
    figure.suptitle(title)
    save(figure, path)


def smooth(curves: np.ndarray) -> np.ndarray:
    """Return the means over windows of SMOOTHED points of curves [..., points] that are long."""
    if curves.shape[-1] < LONG:
        return curves
    n = curves.shape[-1] // SMOOTHED
    return curves[..., :n * SMOOTHED].reshape(*curves.shape[:-1], n, SMOOTHED).mean(-1)
