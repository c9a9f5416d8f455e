"""Pictures of step times, predicted and measured: how a step scales, what overlap hides; and of losses by format."""
from collections.abc import Mapping, Sequence
from statistics import mean

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from shardlab.report.charts import finish
from shardlab.report.drawing import name_rows, one_panel

COLORS = {"t": "#0072B2", "p": "#D55E00", "d": "#009E73"}
OVERLAPS = "gradients", "gradients, ZeRO-2", "gradients, ZeRO-3", "ZeRO-3's prefetch", "ring attention"
WINDOW = 25         # iterations whose mean is drawn
NAMES = {"t": "tensor parallel", "p": "pipeline", "d": "data parallel"}


def draw_predictions(names: Sequence[str], predicted: Sequence[float], measured: Sequence[float]) -> Figure:
    """Draw a row for each topology, the slowest on top: a bar for the measured time, a stroke for the predicted one."""
    order = sorted(range(len(names)), key=lambda i: -measured[i])
    figure, axes = one_panel(8.5, 0.32 * len(names) + 1.2)
    axes.barh(range(len(names)), [1e3 * measured[i] for i in order], 0.66, color="#9CC7E4", label="measured")
    axes.plot([1e3 * predicted[i] for i in order], range(len(names)), "|", markersize=14, markeredgewidth=2.5,
              color="#D55E00", label="predicted")
    name_rows(axes, [names[i] for i in order], 0)
    axes.set_xlim(0)
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


def draw_formats(found: Mapping[str, Sequence]) -> Figure:
    """Draw the training losses of all runs (formats.py's Curves, by format), and their differences to float32's."""
    figure = Figure((10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (form, runs), color in zip(found.items(), COLORS.values()):
        for i, (curves, others) in enumerate(zip(runs, found["float32"])):
            at, losses, theirs = windows(list(curves.training)), *(
                windows(list(one.training.values())) for one in (curves, others))
            left.plot(at, losses, color=color, linewidth=1, label="" if i else form)
            if form != "float32":
                right.plot(at, [one - other for one, other in zip(losses, theirs)], color=color, linewidth=1)
    right.axhline(0, color="#707070", linewidth=1)
    finish(left, "iteration", f"training loss, means of {WINDOW} iterations", "both", "nats")
    finish(right, "iteration", "less float32's, from the same seed", "both")
    left.legend(frameon=False)
    return figure


def windows(values: Sequence[float]) -> list[float]:
    """Return the means of each WINDOW neighbours."""
    return [mean(values[i:i + WINDOW]) for i in range(0, len(values), WINDOW)]


def draw_overlap(found: Mapping[str, Sequence], swept: Mapping[str, str]) -> Figure:
    """Draw the hidden shares of messages of each kind, and below them the step's time with and without overlap.

    `found` has Overlaps (overlap.py) by the way that messages take, and `swept` what varies, by kind.
    """
    figure = Figure((14, 6.4), layout="constrained")
    panels = figure.subplots(2, len(swept), sharex="col", sharey="row")
    for (above, below), (kind, label), title in zip(panels.T, swept.items(), OVERLAPS, strict=True):
        for (name, overlaps), color in zip(found.items(), COLORS.values()):
            curve = [one for one in overlaps if one.kind == kind]
            sizes = [one.size for one in curve]
            above.plot(sizes, [one.hidden for one in curve], "o-", color=color, label=name)
            above.plot(sizes, [one.unhelped for one in curve], "o:", color=color, markerfacecolor="white",
                       label=f"{name}, without help")
            below.plot(sizes, [1 - one.won / one.immediate for one in curve], "o-", color=color)
        below.set_xscale("log", base=2)
        below.set_xticks(sizes, [f"{one:,.4g}" for one in sizes])
        below.minorticks_off()
        above.axhline(0, color="#707070", linewidth=1)
        below.axhline(1, color="#707070", linewidth=1)
        finish(above, "", title, "both")
        finish(below, label, "", "both")
    panels[0, 0].set_ylabel("share of message time that is hidden", fontsize=9)
    panels[1, 0].set_ylabel("step / step that waits at each message", fontsize=9)
    for axes in panels.flat:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False,
                  fontsize=9)
    return figure
