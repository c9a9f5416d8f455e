"""The picture of the bug matrix: a thin row for each bug, grouped by kind, and a column for each detector."""
from collections.abc import Mapping, Sequence

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.bug_matrix.verdict import SEEN, SILENT, Verdict
from tests import zoo
from tests.zoo.entry import KINDS, Entry

LATE = 20       # steps
# Near the colours of Okabe and Ito; apart in grey, too: dark is seen, bright is silent, and pale is not applicable.
COLORS = ("#0B3C5D", "#4FA3D9", "#F2B134", "#ECECEC", "#FFFFFF")
WORDS = ("seen without steps, or within 20", f"seen after more than {LATE} steps", "silent", "not applicable")
ROW, GAP = 0.066, 2.2      # inches a bug; rows between two kinds


def draw(results: Mapping[str, Mapping[str, Verdict]], names: Sequence[str]) -> Figure:
    """Draw two panels of kinds, one beside the other."""
    blocks = {kind: sorted((entry for entry in zoo.ENTRIES if entry.kind == kind and entry.name in results),
                           key=lambda entry: sees(results[entry.name])) for kind in KINDS}
    left, right = halves({kind: len(entries) + GAP for kind, entries in blocks.items() if entries})
    rows = max(sum(len(blocks[kind]) + GAP for kind in half) for half in (left, right))
    figure = Figure((9.0, ROW * rows + 1.3), layout="constrained")
    for axes, kinds in zip(figure.subplots(1, 2), (left, right), strict=True):
        draw_panel(axes, {kind: blocks[kind] for kind in kinds}, results, names, rows)
    figure.legend(handles=[Patch(facecolor=color, edgecolor="#888888", linewidth=0.5, label=word)
                           for color, word in zip(COLORS, WORDS)], loc="outside lower center", ncols=4,
                  frameon=False, fontsize=8.5)
    return figure


def draw_panel(axes, blocks: Mapping[str, list[Entry]], results, names: Sequence[str], rows: float) -> None:
    """Draw some kinds, one below the other."""
    y, palette = 0.0, ListedColormap(COLORS)
    for kind, entries in blocks.items():
        colors = [[color(results[entry.name].get(name)) for name in names] for entry in entries]
        axes.pcolormesh(range(len(names) + 1), [y + i for i in range(len(entries) + 1)], colors, cmap=palette, vmin=0,
                        vmax=len(COLORS) - 1, edgecolors="white", linewidth=0.25)
        axes.text(-0.25, y + len(entries) / 2, f"{kind}\n{len(entries)}", ha="right", va="center", fontsize=8.5)
        y += len(entries) + GAP
    axes.set(xlim=(0, len(names)), ylim=(rows, -0.5), yticks=[])
    axes.set_xticks([i + 0.5 for i in range(len(names))], names, rotation=50, ha="left", fontsize=8.5)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def color(verdict: Verdict | None) -> int:
    """Return the number of a verdict's color."""
    if verdict is None:
        return 4
    if verdict.mark == SEEN:
        return 0 if verdict.step <= LATE else 1
    return 2 if verdict.mark == SILENT else 3


def sees(verdicts: Mapping[str, Verdict]) -> list[int]:
    """Return what sorts bugs: those that are seen early by many come first."""
    return [color(verdicts.get(name)) for name in verdicts]


def halves(sizes: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """Divide the kinds, in order, so that both halves are about equally long."""
    kinds = list(sizes)
    cut = min(range(1, len(kinds)), default=1,
              key=lambda i: abs(sum(list(sizes.values())[:i]) - sum(list(sizes.values())[i:])))
    return kinds[:cut], kinds[cut:]
