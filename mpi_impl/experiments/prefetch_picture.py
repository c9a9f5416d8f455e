"""The picture of a step with and without prefetch: for each way what a rank does, above the gathers under way."""
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpi_impl.experiments.prefetch import TracedStep
from mpi_impl.report.charts import COLORS, WORDS, finish
from mpi_impl.runtime.pictures import save

GATHER, REDUCE = "#CC79A7", "#F0C842"


def draw_prefetch(path: str, steps: dict[str, TracedStep]) -> None:
    """Draw a panel for each step, by its name, with one time axis."""
    figure = Figure(figsize=(10, 1.1 + 1.5 * len(steps)), layout="constrained")
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, step) in zip(panels, steps.items()):
        first = min(one.start for one in step.slices)
        for kind in "FB":
            draw_computing(axes, step, kind, first)
        for gather in step.gathers:
            draw_bar(axes, 0, gather.start - first, gather.end - first, GATHER, label_of(gather.unit))
        for one in step.waits:
            if one.name == "gradients":
                draw_bar(axes, 1, one.start - first, one.end - first, REDUCE)
        axes.set_yticks([0, 1], ["gathers", "the rank"])
        finish(axes, "", f"{name}: a step of {1e3 * step.seconds:.1f} ms", "x")
    panels[-1].set_xlabel("time (ms)", fontsize=9)
    legend = {WORDS["F"]: COLORS["F"], WORDS["B"]: COLORS["B"], "a block is gathered": GATHER,
              "gradients are waited for": REDUCE}
    figure.legend([Patch(color=color) for color in legend.values()], legend, loc="outside lower center",
                  ncols=len(legend), frameon=False, fontsize=9)
    save(figure, path)


def draw_computing(axes, step: TracedStep, kind: str, first: float) -> None:
    """Draw an action without the waits inside it."""
    action = step.action(kind)
    waits = [one for one in step.waits if action.start <= one.start <= action.end]
    for start, end in zip([action.start, *(one.end for one in waits)], [*(one.start for one in waits), action.end]):
        draw_bar(axes, 1, start - first, end - first, COLORS[kind])


def draw_bar(axes, row: int, start: float, end: float, color: str, label: str = "") -> None:
    """Draw a bar, from start to end in seconds."""
    axes.barh(row, 1e3 * (end - start), left=1e3 * start, height=0.7, color=color, edgecolor="white", linewidth=0.8)
    axes.text(1e3 * (start + end) / 2, row, label, ha="center", va="center", fontsize=8)


def label_of(unit: str) -> str:
    """Return a block's number, and nothing for the small units before and after the blocks."""
    return unit.removeprefix("blocks.") if unit.startswith("blocks.") else ""
