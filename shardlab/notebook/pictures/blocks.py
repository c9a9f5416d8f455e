"""A transformer block on t ranks: what is replicated, what is sharded, and what is sent."""
from typing import NamedTuple

from shardlab.notebook.pictures.shards import WHOLE, color_of
from shardlab.report.drawing import Picture, draw_box, draw_legend, hide_frame, name_rows

OUTSIDE, INSIDE, EDGE = "outside", "inside", "edge"
LANE = 0.84             # of a rank's row
HIGH, WIDE = 0.5, 0.92  # inches: of a row, of a unit of width


class BlockStep(NamedTuple):
    """Something that a rank does with its [b, s, h], from left to right; or the edge of a region."""

    kind: str
    label: str
    width: float


def branch(region: str) -> list[BlockStep]:
    return [BlockStep(OUTSIDE, "layer norm", 1), BlockStep(EDGE, "f", 0.45), BlockStep(INSIDE, region, 2.2),
            BlockStep(EDGE, "g", 0.45), BlockStep(OUTSIDE, "dropout", 0.9), BlockStep(OUTSIDE, "add x", 0.7)]


SHARED = {"attention": "heads", "MLP": "columns"}
STEPS = [*branch("attention"), *branch("MLP")]
# The collectives of f and g, forward and backward ('' for none), without and with sequence parallelism.
EDGES = {False: {"f": ("", "all-reduce"), "g": ("all-reduce", "")},
         True: {"f": ("all-gather", "reduce-scatter"), "g": ("reduce-scatter", "all-gather")}}


def draw_block(t: int, sequence_parallel: bool = False) -> Picture:
    """Draw a row for each rank. The vertical axis of a row is positions: a strip is a shard of them."""
    width, top, bottom = sum(step.width for step in STEPS), 0.5, 0.85
    height = top + HIGH * t + bottom
    figure = Picture((WIDE * width, height))
    axes = figure.add_axes((0.06, bottom / height, 0.935, HIGH * t / height), xlim=(0, width), xticks=[])
    name_rows(axes, [f"rank {rank}" for rank in range(t)])
    left = 0.0
    for step in STEPS:
        if step.kind == EDGE:
            draw_edge(axes, *EDGES[sequence_parallel][step.label], "" if sequence_parallel else step.label,
                      left + step.width / 2, t)
        else:
            draw_step(axes, step, left, t, sequence_parallel)
        left += step.width
    hide_frame(axes)
    explain(figure, t, sequence_parallel)
    steps = (f"{'/'.join(EDGES[sequence_parallel][step.label])} ({step.label})" if step.kind == EDGE else
             f"{step.label} ({'on shards' if sequence_parallel or step.kind == INSIDE else 'the same on every rank'})"
             for step in STEPS)
    figure.set_label(f"A transformer block on {t} ranks, from left to right, at edges what is sent forward/backward: "
                     f"{', '.join(steps)}.")
    return figure


def draw_step(axes, step: BlockStep, left: float, t: int, sequence_parallel: bool) -> None:
    """Draw a rectangle for each rank: grey if all do the same, else in the rank's colour."""
    strip = sequence_parallel and step.kind == OUTSIDE
    for rank in range(t):
        first, high = rank + (1 - LANE) / 2, LANE / t if strip else LANE
        own = strip or step.kind == INSIDE
        draw_box(axes, left + 0.03, first + (rank * high if strip else 0), step.width - 0.06, high,
                 color_of(rank) if own else WHOLE,
                 f"1/{t} of the {SHARED[step.label]}" if step.kind == INSIDE else "")
    axes.text(left + step.width / 2, -0.12, step.label, ha="center", va="bottom", fontsize=9)


def draw_edge(axes, forward: str, backward: str, label: str, middle: float, t: int) -> None:
    """Draw a bar through all ranks if something is sent forward, else a line; and name what is sent in each direction.
    """
    if forward:
        draw_box(axes, middle - 0.06, 0.02, 0.12, t - 0.04, "#303030")
    else:
        axes.plot([middle, middle], [0.02, t - 0.02], color="#303030", linewidth=1, linestyle=(0, (4, 3)))
    above = [f"{forward} →"] * bool(forward) + [label]
    axes.text(middle, -0.12, "\n".join(above), ha="center", va="bottom", fontsize=9, fontweight="bold")
    if backward:
        axes.text(middle, t + 0.1, f"← {backward}", ha="center", va="top", fontsize=9, fontweight="bold")


def explain(figure, t: int, sequence_parallel: bool) -> None:
    """Draw the legend, and below it what bold text and strips mean."""
    entries = {f"rank {rank}'s own": color_of(rank) for rank in range(t)}
    if not sequence_parallel:
        entries[f"identical on every rank: done {t} times"] = WHOLE
    draw_legend(figure, entries, "lower left", bbox_to_anchor=(0.05, 0), fontsize=9)
    strips = f"; a thin strip is 1/{t} of the positions" if sequence_parallel else ""
    figure.text(0.062, 0.3 / figure.get_figheight(), "in bold: what moves between the ranks, forward (→, above) and "
                f"backward (←, below){strips}", fontsize=9, color="#505050")
