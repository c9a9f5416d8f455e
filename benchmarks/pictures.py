"""Pictures of predicted and measured step times: how a step scales with the ranks, what overlap hides, where time goes.
"""
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpi_impl.report.charts import finish

COLORS = {"t": "#0072B2", "p": "#D55E00", "d": "#009E73"}
OVERLAPS = "gradients", "gradients, ZeRO-2", "gradients, ZeRO-3", "ZeRO-3's prefetch", "ring attention"
NAMES = {"t": "tensor parallel", "p": "pipeline", "d": "data parallel"}
KINDS = {"matrix products": "#0072B2", "our kernels": "#009E73", "Python, and NumPy outside kernels": "#D55E00",
         "messages": "#CC79A7", "waiting for other ranks": "#8A8A8A", "no core": "#B8B8B8"}   # as in cpu_times.py


def draw_predictions(names: Sequence[str], predicted: Sequence[float], measured: Sequence[float]) -> Figure:
    """Draw a row for each topology, the slowest on top: a bar for the measured time, a stroke for the predicted one."""
    order = sorted(range(len(names)), key=lambda i: -measured[i])
    figure = Figure((8.5, 0.32 * len(names) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(range(len(names)), [1e3 * measured[i] for i in order], 0.66, color="#9CC7E4", label="measured")
    axes.plot([1e3 * predicted[i] for i in order], range(len(names)), "|", markersize=14, markeredgewidth=2.5,
              color="#D55E00", label="predicted")
    axes.set(yticks=range(len(names)), yticklabels=[names[i] for i in order], ylim=(len(names) - 0.5, -0.5),
             xlim=(0, None))
    axes.legend(frameon=False, loc="lower right")
    finish(axes, "ms of a step", "", "x")
    return figure


def draw_scaling(strong: Mapping[str, Mapping[int, float]], weak: Mapping[str, Mapping[int, float]],
                 cores: int) -> Figure:
    """Draw speedups by kind of parallelism and ranks, and FLOP/s of a rank as a fraction of one rank's."""
    figure = Figure((10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    ranks = sorted({n for found in strong.values() for n in found})
    left.plot(ranks, ranks, color="#B0B0B0", linestyle="--", linewidth=1, label="ideal")
    right.plot(ranks, [1] * len(ranks), color="#B0B0B0", linestyle="--", linewidth=1)
    for axes, curves, title in ((left, strong, "strong scaling: times as fast as one rank"),
                                (right, weak, "weak scaling: FLOP/s of a rank, beside one rank's")):
        for kind, found in curves.items():
            axes.plot(list(found), list(found.values()), color=COLORS[kind], label=NAMES[kind], zorder=2)
            for n, value in found.items():
                axes.plot(n, value, "o", color=COLORS[kind], markersize=7, zorder=3,
                          markerfacecolor=COLORS[kind] if n <= cores else "white")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, map(str, ranks))
        finish(axes, "ranks; full circles: wall clock, hollow ones: virtual clock", title, "both")
    left.set_yscale("log", base=2)
    left.set_yticks(ranks, map(str, ranks))
    right.set_ylim(0, 1.15)
    left.legend(frameon=False)
    return figure


def draw_overlap(found: Mapping[str, Sequence], swept: Mapping[str, str]) -> Figure:
    """Draw the hidden shares of messages of each kind, and below them the step's time with and without overlap.

    `found` has Overlaps (overlap.py) by the way that messages take, and `swept` what varies, by kind.
    """
    figure = Figure((14, 6.4), layout="constrained")
    panels = figure.subplots(2, len(swept), sharex="col", sharey="row")
    for (above, below), (kind, label), title in zip(panels.T, swept.items(), OVERLAPS, strict=True):
        curves = {name: [one for one in overlaps if one.kind == kind] for name, overlaps in found.items()}
        sizes = [one.size for one in next(iter(curves.values()))]
        for (name, curve), color in zip(curves.items(), COLORS.values()):
            above.plot(sizes, [one.hidden for one in curve], "o-", color=color, label=name)
            above.plot(sizes, [one.unhelped for one in curve], "o:", color=color, markerfacecolor="white",
                       label=f"{name}, without help")
            below.plot(sizes, [1 - one.won / one.immediate for one in curve], "o-", color=color)
        below.set_xscale("log", base=2)
        below.set_xticks(sizes, [f"{one:,.4g}" for one in sizes])
        below.minorticks_off()
        below.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
        below.margins(y=0.12)
        above.axhline(0, color="#707070", linewidth=1)
        below.axhline(1, color="#707070", linewidth=1)
        finish(above, "", title, "both")
        finish(below, label, "", "both")
        if kind in ("buckets", "zero_2"):   # the same work at all sizes, so that the steps' times can be compared
            label_steps(below, curves.values())
    panels[0, 0].set_ylabel("share of message time that is hidden", fontsize=9)
    panels[1, 0].set_ylabel("step / step that waits at each message", fontsize=9)
    panels[1, 0].yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    for axes in panels.flat:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False,
                  fontsize=9)
    return figure


def label_steps(axes, curves: Iterable[Sequence]) -> None:
    """Write the milliseconds of each step above its point, or below the lowest of its size."""
    for overlaps in zip(*curves):
        heights = [1 - one.won / one.immediate for one in overlaps]
        for one, height, color in zip(overlaps, heights, COLORS.values()):
            axes.annotate(f"{1e3 * one.overlapped:,.0f} ms", (one.size, height), color=color, fontsize=8, ha="center",
                          xytext=(0, -14 if height == min(heights) else 8), textcoords="offset points",
                          bbox=dict(facecolor="white", edgecolor="none", pad=0.5))


def draw_where(cases: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw a bar for each case, the first on top: shares of a step's time by kind of work."""
    figure = Figure((9, 0.45 * len(cases) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    for row, found in enumerate(cases.values()):
        left, whole = 0.0, sum(found.values())
        for kind, color in KINDS.items():
            share = 100 * found.get(kind, 0.0) / whole
            axes.barh(row, share, 0.7, left=left, color=color, label=kind if row == 0 else None)
            if share >= 4:
                axes.text(left + share / 2, row, f"{share:.0f}", ha="center", va="center", fontsize=8, color="white")
            left += share
    axes.set(yticks=range(len(cases)), yticklabels=list(cases), ylim=(len(cases) - 0.5, -0.5), xlim=(0, 100))
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=9)
    finish(axes, "% of a step's wall time", "", "x")
    return figure
