"""Pictures of context parallelism: which rank computes which of attention's scores, and in which step of the ring."""
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from reference.positions import visible_blocks, work_of_ranks
from shardlab.notebook.pictures.shards import color_of, rank_colors
from shardlab.report.drawing import Picture, draw_legend

HIDDEN, LATER, EARLIER = "#FFFFFF", "#F0F0F0", "#C4C4C4"      # what a causal mask hides; other steps of the ring


def draw_deals(deals: Mapping[str, Sequence[Sequence[slice]]]) -> Picture:
    """Draw for each way to deal out positions who computes which scores, a row for each query, and the ranks' work."""
    figure = Picture((3.4 * len(deals), 5.2), layout="constrained")
    for column, (name, chunks) in enumerate(deals.items()):
        axes, bars = (figure.add_subplot(2, len(deals), 1 + column + row * len(deals)) for row in (0, 1))
        found = score_owners(chunks)
        draw_scores(axes, np.array([to_rgb(HIDDEN), *(to_rgb(color_of(rank)) for rank in range(len(chunks)))]),
                    found + 1, name)
        work = work_of_ranks([list(own) for own in chunks])
        bars.bar(range(len(work)), work, color=[color_of(rank) for rank in range(len(work))])
        bars.axhline(sum(work) / len(work), color="#505050", linewidth=0.8, linestyle="--")
        bars.set(xticks=range(len(work)), ylim=(0, 1.15 * 2 * sum(work) / len(work)))
        bars.set_xlabel("rank", fontsize=8)
        bars.set_ylabel("pairs" if column == 0 else "", fontsize=8)
        bars.tick_params(labelsize=8)
        bars.spines[["top", "right"]].set_visible(False)
    said = (f"{name}: {', '.join(map(str, work_of_ranks([list(own) for own in chunks])))} pairs on rank 0, 1, ..."
            for name, chunks in deals.items())
    figure.set_label(f"Scores of causal attention, a row for each query, in the colour of its rank. {'; '.join(said)}.")
    return figure


def draw_ring_of_blocks(chunks: Sequence[Sequence[slice]]) -> Picture:
    """Draw the steps of a ring: the scores that each rank computes, in its colour, with the keys that it has then."""
    c = len(chunks)
    figure = Picture((2.3 * c, 3.0), layout="constrained")
    colors = np.array([to_rgb(color) for color in (HIDDEN, LATER, EARLIER, *map(color_of, range(c)))])
    owners = score_owners(chunks)
    for step, axes in enumerate(figure.subplots(1, c, squeeze=False)[0]):
        steps = ring_steps(chunks)
        painted = np.where(owners < 0, 0, np.where(steps > step, 1, np.where(steps < step, 2, owners + 3)))
        name = "step 0: own keys" if step == 0 else f"step {step}: of rank - {step}"
        draw_scores(axes, colors, painted, name, labels=step == 0)
    draw_legend(figure, {**rank_colors(range(c)), "done": EARLIER, "to come": LATER})
    counts = (", ".join(str(np.sum((owners == rank) & (ring_steps(chunks) == step))) for rank in range(c))
              for step in range(c))
    figure.set_label("Scores that rank 0, 1, ... computes in each step of a ring: "
                     + "; ".join(f"step {step}: {n}" for step, n in enumerate(counts)) + ".")
    return figure


def draw_scores(axes: Axes, colors: np.ndarray, numbers: np.ndarray, title: str, labels: bool = True) -> None:
    """Paint a matrix of scores, a row for each query; numbers choose from the colours."""
    axes.imshow(colors[numbers], interpolation="nearest")
    axes.set_title(title, fontsize=9)
    axes.set(xticks=[], yticks=[])
    if labels:
        axes.set_xlabel("keys", fontsize=8)
        axes.set_ylabel("queries", fontsize=8)
    axes.spines[:].set_color("#A0A0A0")


def score_owners(chunks: Sequence[Sequence[slice]]) -> np.ndarray:
    """Return the rank that computes each score [s, s]; -1 where a causal mask hides it."""
    s = max(chunk.stop for own in chunks for chunk in own)
    rank_of_query = np.zeros(s, int)
    for rank, own in enumerate(chunks):
        for chunk in own:
            rank_of_query[chunk] = rank
    return np.where(np.tri(s, dtype=bool), rank_of_query[:, None], -1)


def ring_steps(chunks: Sequence[Sequence[slice]]) -> np.ndarray:
    """Return the step of the ring in which each score [s, s] is computed; -1 where a causal mask hides it."""
    c, found = len(chunks), np.where(score_owners(chunks) < 0, -1, 0)
    for rank, own in enumerate(chunks):
        for step in range(c):
            for block in visible_blocks(list(own), list(chunks[(rank - step) % c]), causal=True):
                n = block.queries.stop - block.queries.start
                rows, columns = (slice(first, first + n) for first in (block.first_query, block.first_key))
                found[rows, columns] = np.where(found[rows, columns] < 0, -1, step)
    return found
