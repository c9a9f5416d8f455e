"""Pictures of floating-point formats (reference/precision.py): their bits, their numbers, their rounding errors, what
happens to gradients in them, and the values of a loss scale.
"""
from collections.abc import Sequence

import numpy as np

from reference.precision import Format, rounded
from shardlab.notebook.pictures.shards import OWNERS
from shardlab.report.charts import finish
from shardlab.report.drawing import (Picture, described, draw_box, draw_legend, hide_frame, name_rows, one_panel,
                                     several_panels)

BITS = {"sign": "#888888", "exponent": OWNERS[1], "fraction": OWNERS[0]}
POINTS = 3000       # samples of a number line: closer numbers are drawn as a band

# What happens to a number. The colours differ in brightness, so that a print in grey shows them, too.
FATES = {"lost": "#AA4422", "short of digits": "#F0C842", "kept": "#0072B2", "infinite": "#303030"}


# ---- the formats ----------------------------------------------------------------------------------------------------


def draw_bits(forms: Sequence[Format]) -> Picture:
    """Draw a row for each format, its most significant bit at the left."""
    figure, axes = one_panel(9, 0.42 * len(forms) + 0.65, xticks=[],
                             xlim=(0, max(1 + form.exponent + form.fraction for form in forms)))
    for row, form in enumerate(forms):
        counts = {"sign": 1, "exponent": form.exponent, "fraction": form.fraction}
        colors = [BITS[part] for part, n in counts.items() for _ in range(n)]
        for i, color in enumerate(colors):
            draw_box(axes, i + 0.06, row + 0.14, 0.88, 0.72, color)
    name_rows(axes, [form.name for form in forms])
    hide_frame(axes)
    draw_legend(figure, BITS, fontsize=9)
    return described(figure, "Bits of sign, exponent and fraction: ", (
        f"{form.name} 1, {form.exponent} and {form.fraction}" for form in forms))


def draw_number_lines(forms: Sequence[Format], ranges: Sequence[tuple[float, float]]) -> Picture:
    """Draw a panel for each range, with a line for each format and a tick at each of its numbers."""
    figure, panels = several_panels(9, (0.3 * len(forms) + 0.62) * len(ranges), len(ranges))
    words = []
    for axes, (start, stop) in zip(panels, ranges):
        counts = []
        for row, form in enumerate(forms):
            numbers = numbers_between(form, start, stop)
            axes.vlines(numbers, row + 0.12, row + 0.88, color=OWNERS[row], linewidth=1)
            counts.append(f"{form.name} has {len(numbers) if len(numbers) < POINTS / 3 else 'very many'}")
        axes.set_xlim(start, stop)
        name_rows(axes, [form.name for form in forms])
        hide_frame(axes, below=True)
        words.append(f"from {start:g} to {stop:g} {', '.join(counts)}")
    return described(figure, "Number lines with a tick at each number of a format: ", words)


def numbers_between(form: Format, start: float, stop: float) -> np.ndarray:
    """Return the format's numbers in a range, as far as POINTS samples distinguish them."""
    found = np.unique(rounded(np.linspace(start, stop, POINTS), form))
    return found[(found >= start) & (found <= stop)]


def draw_rounding(forms: Sequence[Format], powers: tuple[int, int]) -> Picture:
    """Draw the largest relative rounding error for numbers between two powers of 2."""
    x = np.exp2(np.linspace(*powers, 4001))
    figure, axes = one_panel(9, 3.3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for form, color in zip(forms, OWNERS):
        axes.plot(x, may_err(form, x), color=color, linewidth=2, label=form.name)
    axes.set(xlim=(x[0], x[-1]), ylim=(None, 1))
    finish(axes, "size of the number", "", "both", "largest error / number")
    axes.legend(frameon=False, fontsize=9, loc="upper center", ncols=len(forms))
    return described(figure, "The largest relative rounding error, level in each format's range, and larger below it: ",
                     (f"{form.name} {form.epsilon / 2:.2g} from {form.smallest_normal:.2g} to {form.largest:.3g}"
                      for form in forms))


def may_err(form: Format, x: np.ndarray) -> np.ndarray:
    """Return half the distance between the format's numbers around x, over x; 1 if x becomes 0, nan beyond the largest.
    """
    _, exponent = np.frexp(np.maximum(x, form.smallest_normal))
    half = np.ldexp(form.epsilon / 2, exponent - 1)
    return np.where(x > form.largest, np.nan, np.minimum(half / x, 1))


# ---- gradients ------------------------------------------------------------------------------------------------------


def draw_fates(values: np.ndarray, scales: Sequence[float], form: Format) -> Picture:
    """Draw a panel for each scale: how many scaled values have each power of 2, and what happens to them."""
    figure, panels = several_panels(9, 1.35 * len(scales) + 0.9, len(scales), sharex=True)
    sizes = abs(np.asarray(values, np.float64).ravel())
    sizes = sizes[sizes > 0]
    least, most = (int(np.floor(np.log2(size))) for size in (sizes.min() * min(scales), sizes.max() * max(scales)))
    bounds = np.log2([form.smallest_normal * form.epsilon, form.smallest_normal, form.largest])
    for axes, scale in zip(panels, scales):
        fates, powers = fates_of(sizes * scale, form), np.floor(np.log2(sizes * scale)).astype(int)
        bottom = np.zeros(most - least + 1)
        for fate, color in FATES.items():
            heights = np.bincount(powers[fates == fate] - least, minlength=len(bottom)) / len(sizes)
            axes.bar(np.arange(least, most + 1) + 0.5, heights, 0.86, bottom, color=color)
            bottom += heights
        shares = [f"{np.mean(fates == fate):.0%} {fate}" for fate in FATES if fate != "kept" and (fates == fate).any()]
        axes.set_title(f"times $2^{{{int(np.log2(scale))}}}$: {', '.join(shares) or 'all kept'}", loc="left",
                       fontsize=10)
        axes.set(yticks=[], xlim=(least - 0.5, most + 1.5))
        hide_frame(axes, below=True)
        for bound in bounds[(bounds >= least) & (bounds <= most + 1)]:
            axes.axvline(bound, color="#606060", linestyle="--", linewidth=1)
    panels[-1].set_xlabel(f"power of 2 (dashed: {form.name}'s smallest number above 0, its smallest number with all "
                          "digits, and its largest)", fontsize=9)
    draw_legend(figure, FATES, fontsize=9)
    return described(figure, f"How many gradients have each power of 2 in {form.name}, and what happens to them, ",
                     (axes.get_title(loc="left") for axes in panels))


def fates_of(x: np.ndarray, form: Format) -> np.ndarray:
    """Return the key of FATES for each positive number."""
    y = rounded(x, form)
    return np.select([y == 0, np.isinf(y), x < form.smallest_normal],
                     ["lost", "infinite", "short of digits"], "kept")


def draw_scale(scales: Sequence[float], skipped: Sequence[bool], limits: Sequence[float] = (),
               title: str = "") -> Picture:
    """Draw the loss scale of each step, crosses at skipped steps, and `limits`, above which gradients overflow."""
    figure, axes = one_panel(9, 3.2)
    axes.set_yscale("log", base=2)
    steps = np.arange(1, len(scales) + 1)
    if len(limits):
        axes.plot(steps, limits, color="#909090", linestyle="--", linewidth=1.5, label="above this, overflow")
    axes.step(steps, scales, where="mid", color=OWNERS[0], linewidth=2.2, label="loss scale")
    crossed = np.flatnonzero(skipped)
    axes.plot(steps[crossed], np.asarray(scales)[crossed], "X", color=OWNERS[6], markersize=8, label="step skipped")
    finish(axes, "step", title, "both")
    axes.legend(frameon=False, fontsize=9)
    first, last = np.log2(scales[0]), np.log2(scales[-1])
    return described(figure, f"{title}: from 2^{first:g} at step 1 to 2^{last:g} at step {len(scales)}. Steps that are "
                     f"skipped: {', '.join(map(str, steps[crossed])) or 'none'}")
