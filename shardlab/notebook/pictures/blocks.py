"""A transformer block on t ranks: what is replicated, what is sharded, and what is sent."""
from shardlab.notebook.pictures.shards import WHOLE, color_of
from shardlab.report.drawing import Picture, described, draw_box, draw_legend, hide_frame, name_rows, write

LANE = 0.84                     # of a rank's row
HIGH, WIDE = 0.5, 0.92          # inches: of a row, of a unit of width
TOP, BOTTOM = 0.5, 0.85
SHARED = {"attention": "heads", "MLP": "columns"}
EDGE = 0.45
# The steps from left to right, with their widths, and the edges f and g of a region between them.
STEPS = [step for region in SHARED for step in (("layer norm", 1), ("f", EDGE), (region, 2.2), ("g", EDGE),
                                                ("dropout", 0.9), ("add x", 0.7))]
# The collectives of f and g, forward and backward ('' for none), without and with sequence parallelism.
EDGES = {False: {"f": ("", "all-reduce"), "g": ("all-reduce", "")},
         True: {"f": ("all-gather", "reduce-scatter"), "g": ("reduce-scatter", "all-gather")}}


def draw_block(t: int, sequence_parallel: bool = False) -> Picture:
    """Draw a row for each rank. The vertical axis of a row is positions: a strip is a shard of them."""
    width, height, edges = sum(wide for _, wide in STEPS), TOP + HIGH * t + BOTTOM, EDGES[sequence_parallel]
    figure = Picture((WIDE * width, height))
    axes = figure.add_axes((0.06, BOTTOM / height, 0.935, HIGH * t / height), xlim=(0, width), xticks=[])
    name_rows(axes, [f"rank {rank}" for rank in range(t)])
    left, words = 0.0, []
    for name, wide in STEPS:
        if name in edges:
            draw_edge(axes, *edges[name], "" if sequence_parallel else name, left + wide / 2, t)
            words.append(f"{'/'.join(edges[name])} ({name})")
        else:
            draw_step(axes, name, left, wide, t, sequence_parallel and name not in SHARED)
            own = sequence_parallel or name in SHARED
            words.append(f"{name} ({'on shards' if own else 'the same on every rank'})")
        left += wide
    hide_frame(axes)
    entries = {f"rank {rank}'s own": color_of(rank) for rank in range(t)}
    if not sequence_parallel:
        entries[f"identical on every rank: done {t} times"] = WHOLE
    draw_legend(figure, entries, "lower left", bbox_to_anchor=(0.05, 0), fontsize=9)
    strips = f"; a thin strip is 1/{t} of the positions" if sequence_parallel else ""
    figure.text(0.062, 0.3 / height, "in bold: what moves between the ranks, forward (→, above) and backward (←, below)"
                + strips, fontsize=9, color="#505050")
    return described(figure, f"A transformer block on {t} ranks, from left to right, at edges what is sent "
                     f"forward/backward: {', '.join(words)}")


def draw_step(axes, name: str, left: float, width: float, t: int, strip: bool) -> None:
    """Draw a rectangle for each rank, grey if all do the same; or a strip of it."""
    own = strip or name in SHARED
    for rank in range(t):
        first, high = rank + (1 - LANE) / 2, LANE / t if strip else LANE
        draw_box(axes, left + 0.03, first + (rank * high if strip else 0), width - 0.06, high,
                 color_of(rank) if own else WHOLE, f"1/{t} of the {SHARED[name]}" if name in SHARED else "")
    write(axes, left + width / 2, -0.12, name, "above")


def draw_edge(axes, forward: str, backward: str, label: str, middle: float, t: int) -> None:
    """Draw a bar through all ranks if something is sent forward, else a line; and name what is sent in each direction.
    """
    if forward:
        draw_box(axes, middle - 0.06, 0.02, 0.12, t - 0.04, "#303030")
    else:
        axes.plot([middle, middle], [0.02, t - 0.02], color="#303030", linewidth=1, linestyle=(0, (4, 3)))
    write(axes, middle, -0.12, "\n".join([f"{forward} →"] * bool(forward) + [label]), "above", fontweight="bold")
    if backward:
        write(axes, middle, t + 0.1, f"← {backward}", "below", fontweight="bold")
