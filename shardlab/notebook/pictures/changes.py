"""A picture of the types of named arrays: a table of all changes, and what each sends, forward and backward."""

from reference.named.types import CHANGES, INVARIANT, PARTIAL, PIECES, REPLICATED, change_of, dual
from shardlab.notebook.pictures.shards import OWNERS, WHOLE
from shardlab.report.drawing import Picture, draw_box, draw_legend, whole_axes

KINDS = INVARIANT, REPLICATED, PARTIAL, PIECES
SENDS = {"sum", "gather", "scatter", "exchange"}
NAMES = {(INVARIANT, REPLICATED): "f", (PARTIAL, INVARIANT): "g"}
COLORS = {(False, False): WHOLE, (False, True): OWNERS[5], (True, False): OWNERS[4], (True, True): OWNERS[2]}
LEGEND = {(False, False): "sends nothing", (False, True): "sends backward", (True, False): "sends forward",
          (True, True): "sends in both directions"}
LEFT, TOP, WIDTH, HEIGHT = 1.1, 0.55, 1.55, 0.62      # inches: of the rows' names, of the columns', of a cell


def draw_changes() -> Picture:
    """Draw a row for each type before a change, and a column for each after it."""
    figure, axes = whole_axes(LEFT + len(KINDS) * WIDTH + 0.2, TOP + len(KINDS) * HEIGHT + 0.5)
    for i, kind in enumerate(KINDS):
        axes.text(LEFT - 0.1, TOP + (i + 0.5) * HEIGHT, kind, ha="right", va="center", fontsize=9)
        axes.text(LEFT + (i + 0.5) * WIDTH, TOP - 0.08, f"to {kind}", ha="center", va="bottom", fontsize=9)
    for before, after in CHANGES:
        forward, backward = change_of(before, after), change_of(dual(after), dual(before))
        name = NAMES.get((before, after))
        draw_box(axes, LEFT + KINDS.index(after) * WIDTH, TOP + KINDS.index(before) * HEIGHT, WIDTH, HEIGHT,
                 COLORS[forward in SENDS, backward in SENDS],
                 f"{f'{name}: ' if name else ''}{forward}\nbackward {backward}", edgecolor="white", linewidth=2)
    draw_legend(figure, {LEGEND[sends]: color for sends, color in COLORS.items()}, "lower left", fontsize=8)
    said = (f"{before} to {after}: {change_of(before, after)}, backward {change_of(dual(after), dual(before))}"
            for before, after in CHANGES)
    figure.set_label(f"A table of the changes between types of named arrays. {'; '.join(said)}.")
    return figure
