"""Pictures of proofs without rounding: where two polynomials agree, how rarely, and what a tolerance hides."""
from collections.abc import Mapping, Sequence

import numpy as np

from shardlab.notebook.pictures.shards import OWNERS
from shardlab.report.charts import finish
from shardlab.report.drawing import Picture, described, name_rows, one_panel

SAME, DIFFERENT, SILENT = OWNERS[2], OWNERS[6], "#F0F0F0"


def draw_meetings(first: Sequence[int], second: Sequence[int], names: Sequence[str], title: str = "") -> Picture:
    """Draw the values of two functions at 0, 1, ..., P - 1 as points, and circles where they agree."""
    figure, axes = one_panel(8.5, 4.2)
    for y, name, color, marker in zip((first, second), names, OWNERS, "os"):
        axes.plot(range(len(y)), y, marker, color=color, markersize=4, label=name)
    meetings = np.flatnonzero(np.equal(first, second))
    axes.plot(meetings, np.asarray(first)[meetings], "o", color=DIFFERENT, markersize=15, markerfacecolor="none",
              markeredgewidth=2, label=f"equal, {len(meetings)} of {len(first)}")
    finish(axes, "x", title, "both")
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return described(figure, f"{title}: points without a pattern. {' and '.join(names)} are equal at {len(meetings)} "
                     f"of {len(first)} places: x = {', '.join(map(str, meetings))}")


def draw_chances(degree: int, counted: Mapping[int, float], marked: Mapping[str, int], landmarks: Mapping[str, float],
                 title: str = "") -> Picture:
    """Draw the bound D / P against P, with some primes marked on it, and chances to compare with as dashed lines.

    `counted` has for some primes a measured share, which is drawn as a point.
    """
    figure, axes = one_panel(8.5, 4.2, xscale="log", yscale="log")
    ends = [float(min(counted)), float(max(marked.values()))]
    axes.plot(ends, [degree / end for end in ends], color=OWNERS[0], linewidth=2, label=f"at most {degree} / P")
    axes.plot(list(counted), list(counted.values()), "o", color=OWNERS[1], markersize=5, label="counted")
    for name, prime in marked.items():
        axes.plot(float(prime), degree / prime, "D", color=OWNERS[0], markersize=6)
        axes.annotate(name, (float(prime), degree / prime), (-8, 0), textcoords="offset points", ha="right", va="top",
                      fontsize=9)
    for name, chance in landmarks.items():
        above = chance > degree / np.sqrt(ends[0] * ends[1])        # then there is more room to the right of the bound
        axes.axhline(chance, color="#909090", linestyle="--", linewidth=1)
        axes.annotate(name, (above, chance), (-3 if above else 3, 3), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right" if above else "left", fontsize=9, color="#505050")
    finish(axes, "P", title, "both", "chance to agree at a random point")
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    marks = ", ".join(f"{name} {degree / prime:.1e}" for name, prime in marked.items())
    others = ", ".join(f"{name} {chance:.1e}" for name, chance in landmarks.items())
    return described(figure, f"{title}: the bound {degree} / P falls as P grows, {marks}. Points are shares that were "
                     f"counted. To compare: {others}")


def draw_differences(found: Mapping[str, tuple[float, bool]], tolerance: float) -> Picture:
    """Draw how far each computation's floats are off, and whether its exact numbers differ. Up to the tolerance the
    background is grey.
    """
    figure, axes = one_panel(8.5, 0.45 * len(found) + 1.1, xscale="log")
    sizes = [size for size, _ in found.values() if size]
    left, right = min([*sizes, tolerance]) / 30, max([*sizes, tolerance]) * 30
    axes.axvspan(left, tolerance, color=SILENT)
    axes.axvline(tolerance, color="#606060", linestyle="--", linewidth=1)
    for text, side in (("floats are silent ", "right"), (" floats see it", "left")):
        axes.annotate(text, (tolerance, 1), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha=side, fontsize=9, color="#505050")
    for y, (size, differs) in enumerate(found.values()):
        color = DIFFERENT if differs else SAME
        axes.plot([left, size or left], [y, y], color=color, linewidth=2)
        axes.plot(size or left, y, "X" if differs else "o", color=color, markersize=9)
        axes.annotate("another formula" if differs else "the same formula", (1, y), (6, 0),
                      xycoords=("axes fraction", "data"), textcoords="offset points", va="center", fontsize=9,
                      color=color)
    axes.set_xlim(left, right)
    name_rows(axes, list(found), 0)
    finish(axes, "largest difference of the floats / largest element", "", "x")
    return described(figure, f"How far floats are off, with a tolerance of {tolerance:g}. ", (
        f"{name}: {'floats see it' if size > tolerance else 'floats are silent'}, and it is "
        f"{'another' if differs else 'the same'} formula" for name, (size, differs) in found.items()))
