"""A picture of the types of named arrays: a table of all changes, and what each sends, forward and backward."""
from reference.named.types import CHANGES, INVARIANT, PARTIAL, PIECES, REPLICATED, change_of, dual
from shardlab.notebook.pictures.shards import OWNERS, WHOLE
from shardlab.report.drawing import Picture, described, draw_box, draw_legend, whole_axes, write

KINDS = INVARIANT, REPLICATED, PARTIAL, PIECES
SENDS = {"sum", "gather", "scatter", "exchange"}
NAMES = {(INVARIANT, REPLICATED): "f: ", (PARTIAL, INVARIANT): "g: "}
# What is sent forward, and backward.
COLORS = {(False, False): ("sends nothing", WHOLE), (False, True): ("sends backward", OWNERS[5]),
          (True, False): ("sends forward", OWNERS[4]), (True, True): ("sends in both directions", OWNERS[2])}
LEFT, TOP, WIDTH, HEIGHT = 1.1, 0.55, 1.55, 0.62      # inches: of the rows' names, of the columns', of a cell


def draw_changes() -> Picture:
    """Draw a row for each type before a change, and a column for each after it."""
    figure, axes = whole_axes(LEFT + len(KINDS) * WIDTH + 0.2, TOP + len(KINDS) * HEIGHT + 0.5)
    for i, kind in enumerate(KINDS):
        write(axes, LEFT - 0.1, TOP + (i + 0.5) * HEIGHT, kind, "left")
        write(axes, LEFT + (i + 0.5) * WIDTH, TOP - 0.08, f"to {kind}", "above")
    words = []
    for before, after in CHANGES:
        forward, backward = change_of(before, after), change_of(dual(after), dual(before))
        draw_box(axes, LEFT + KINDS.index(after) * WIDTH, TOP + KINDS.index(before) * HEIGHT, WIDTH, HEIGHT,
                 COLORS[forward in SENDS, backward in SENDS][1],
                 f"{NAMES.get((before, after), '')}{forward}\nbackward {backward}", edgecolor="white", linewidth=2)
        words.append(f"{before} to {after}: {forward}, backward {backward}")
    draw_legend(figure, dict(COLORS.values()), "lower left", fontsize=8)
    return described(figure, "A table of the changes between types of named arrays. ", words)
