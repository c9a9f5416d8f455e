"""The picture of the bug matrix: a thin column for each bug, grouped by kind, and a row for each detector."""
from collections.abc import Mapping, Sequence

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from benchmarks.bug_matrix.verdict import SEEN, SILENT, Verdict
from shardlab.report.drawing import draw_legend
from tests import zoo
from tests.zoo.entry import KINDS

LATE = 20       # steps
# Near the colours of Okabe and Ito; apart in grey, too: dark is seen, bright is silent, and pale is not applicable.
COLORS = {"seen without steps, or within 20": "#0B3C5D", f"seen after more than {LATE} steps": "#4FA3D9",
          "silent": "#F2B134", "not applicable": "#ECECEC"}


def draw(results: Mapping[str, Mapping[str, Verdict]], names: Sequence[str]) -> Figure:
    """Draw a panel for each kind, as wide as it has bugs. Those that are seen early by many come first."""
    blocks = {kind: sorted([color(results[entry.name][name]) for name in names] for entry in zoo.ENTRIES
                           if entry.kind == kind and results.get(entry.name, {}).keys() >= set(names))
              for kind in KINDS}
    blocks = {kind: columns for kind, columns in blocks.items() if columns}
    figure = Figure((14.0, 4.8), layout="constrained")
    panels = figure.subplots(1, len(blocks), sharey=True, squeeze=False, width_ratios=list(map(len, blocks.values())))
    for axes, (kind, columns) in zip(panels[0], blocks.items()):
        axes.imshow([*zip(*columns)], ListedColormap(list(COLORS.values())), vmin=0, vmax=len(COLORS) - 1,
                    aspect="auto", interpolation="none")
        axes.hlines([i + 0.5 for i in range(len(names))], -0.5, len(columns) - 0.5, color="white", linewidth=1)
        axes.set_title(f"{kind}, {len(columns)}", fontsize=8.5, rotation=65, ha="left", x=0)
        axes.set(xticks=[], yticks=range(len(names)), yticklabels=names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    draw_legend(figure, COLORS, "outside lower center", fontsize=8.5)
    return figure


def color(verdict: Verdict) -> int:
    """Return the number of a verdict's color."""
    if verdict.mark == SEEN:
        return int(verdict.step > LATE)
    return 2 if verdict.mark == SILENT else 3
