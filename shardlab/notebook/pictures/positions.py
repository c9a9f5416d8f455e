"""Pictures of context parallelism: which rank computes which of attention's scores, and in which step of the ring."""
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import to_rgb

from reference.positions import visible_blocks, work_of_ranks
from shardlab.notebook.pictures.shards import color_of, rank_colors
from shardlab.report.drawing import SMALL, Picture, described, draw_legend, paint, several_panels

HIDDEN, LATER, EARLIER = "#FFFFFF", "#F0F0F0", "#C4C4C4"      # what a causal mask hides; other steps of the ring


def draw_deals(deals: Mapping[str, Sequence[Sequence[slice]]]) -> Picture:
    """Draw for each way to deal out positions who computes which scores, a row for each query, and the ranks' work."""
    n = len(deals)
    figure, panels = several_panels(3.4 * n, 5.2, 2, n)
    words = []
    for axes, bars, (name, chunks) in zip(panels, panels[n:], deals.items()):
        colors, work = [color_of(rank) for rank in range(len(chunks))], work_of_ranks([list(own) for own in chunks])
        draw_scores(axes, [HIDDEN, *colors], score_owners(chunks) + 1, name)
        bars.bar(range(len(work)), work, color=colors)
        bars.axhline(sum(work) / len(work), color="#505050", linewidth=0.8, linestyle="--")
        bars.set(xticks=range(len(work)), ylim=(0, 1.15 * 2 * sum(work) / len(work)))
        bars.set_xlabel("rank", fontsize=SMALL)
        bars.tick_params(labelsize=SMALL)
        bars.spines[["top", "right"]].set_visible(False)
        words.append(f"{name}: {', '.join(map(str, work))} pairs on rank 0, 1, ...")
    panels[n].set_ylabel("pairs", fontsize=SMALL)
    return described(figure, "Scores of causal attention, a row for each query, in the colour of its rank. ", words)


def draw_ring_of_blocks(chunks: Sequence[Sequence[slice]]) -> Picture:
    """Draw the steps of a ring: the scores that each rank computes, in its colour, with the keys that it has then."""
    c, owners, steps = len(chunks), score_owners(chunks), ring_steps(chunks)
    figure, panels = several_panels(2.3 * c, 3.0, 1, c)
    words = []
    for step, axes in enumerate(panels):
        painted = np.select([owners < 0, steps > step, steps < step], [0, 1, 2], owners + 3)
        draw_scores(axes, [HIDDEN, LATER, EARLIER, *map(color_of, range(c))], painted,
                    f"step {step}: of rank - {step}" if step else "step 0: own keys", labels=step == 0)
        counts = (str(np.sum(painted == rank + 3)) for rank in range(c))
        words.append(f"step {step}: {', '.join(counts)}")
    draw_legend(figure, {**rank_colors(range(c)), "done": EARLIER, "to come": LATER})
    return described(figure, "Scores that rank 0, 1, ... computes in each step of a ring: ", words)


def draw_scores(axes, colors: Sequence[str], numbers: np.ndarray, title: str, labels: bool = True) -> None:
    """Paint a matrix of scores, a row for each query; numbers choose from the colours."""
    paint(axes, np.array([to_rgb(color) for color in colors])[numbers], title)
    if labels:
        axes.set_xlabel("keys", fontsize=SMALL)
        axes.set_ylabel("queries", fontsize=SMALL)


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
