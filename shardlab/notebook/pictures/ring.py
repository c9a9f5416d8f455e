"""An all-reduce on ranks that form a ring, step by step, and a picture of it."""
from typing import NamedTuple

import numpy as np

from shardlab.notebook.pictures.shards import color_of
from shardlab.report.drawing import SMALL, Picture, described, draw_box, draw_cells, draw_legend, whole_axes, write

WIDE, HIGH, RIGHT, DOWN = 0.42, 0.26, 0.08, 0.16    # inches: of a piece; from one to the next, from a rank to the next


class RingStep(NamedTuple):
    """The state of the ranks after a step."""

    name: str
    held: np.ndarray    # [rank, piece]
    sent: list[int]     # the piece that each rank has sent to the next one; none at the start


def ring_all_reduce(xs: np.ndarray) -> list[RingStep]:
    """Add up the numbers xs [t ranks, t pieces]. Return what all ranks hold, at the start and after each step.

    First a reduce-scatter: piece i starts at rank i + 1, and each rank on its way adds its own number, so that it is
    complete when it reaches rank i. Then an all-gather: complete pieces go round, and replace the others.
    """
    t = len(xs)
    steps, before = [RingStep("start", xs.copy(), [])], (np.arange(t) - 1) % t
    for name, first in (("reduce-scatter", -1), ("all-gather", 0)):
        for step in range(t - 1):
            held, sent = steps[-1].held.copy(), (np.arange(t) + first - step) % t
            arriving = sent[before]                                     # at each rank, from the one before
            values = steps[-1].held[before, arriving]
            held[np.arange(t), arriving] = values + (held[np.arange(t), arriving] if first else 0)
            steps.append(RingStep(f"{name} {step + 1}", held, sent.tolist()))
    return steps


def draw_ring(steps: list[RingStep]) -> Picture:
    """Draw the steps of a ring whose rank i began with 2^i in every piece: a sum's binary digits say who is in it.

    There is a row for each rank, a box for each piece, and in a box a stripe for each rank whose number has been added.
    A piece that has just arrived from the rank above (or, for rank 0, from the last) has a thick frame.
    """
    t = len(steps[0].held)
    panel, tall = t * (WIDE + RIGHT) + 0.35, t * (HIGH + DOWN) + 0.5
    figure, axes = whole_axes(0.75 + panel * t, 2 * tall + 0.42)
    for i, step in enumerate(steps):
        row, column = (0, i) if i < t else (1, i - t + 1)
        left, top = 0.75 + panel * column, 0.45 + tall * row
        draw_step(axes, step, left, top)
        if column == row:
            for rank in range(t):
                write(axes, left - 0.12, top + (HIGH + DOWN) * rank + HIGH / 2, f"rank {rank}", "left", SMALL)
    for piece in range(t):
        write(axes, 0.75 + (WIDE + RIGHT) * piece + WIDE / 2, 0.45 + (HIGH + DOWN) * t, f"piece {piece}", size=7)
    draw_legend(figure, {f"rank {rank}'s number": color_of(rank) for rank in range(t)}, "lower left")
    return described(figure, "Sums in the pieces of each rank. Rank i began with 2^i, so that binary digits say whose "
                     "numbers are in a sum. ", (
        f"{step.name}: {', '.join(f'rank {rank} {own.tolist()}' for rank, own in enumerate(step.held))}"
        for step in steps))


def draw_step(axes, step: RingStep, left: float, top: float) -> None:
    t = len(step.held)
    write(axes, left, top - 0.2, step.name, "above", ha="left")
    for (rank, piece), total in np.ndenumerate(step.held):
        x, y = left + (WIDE + RIGHT) * piece, top + (HIGH + DOWN) * rank
        draw_cells(axes, x, y, [[color_of(who) if int(total) >> who & 1 else "#F4F4F4" for who in range(t)]], WIDE / t,
                   HIGH)
        arrived = bool(step.sent) and step.sent[rank - 1] == piece
        draw_box(axes, x, y, WIDE, HIGH, "none", edgecolor="black" if arrived else "#D0D0D0",
                 linewidth=1.8 if arrived else 0.6)
        if arrived:
            axes.annotate("", (x + WIDE / 2, y), (x + WIDE / 2, y - DOWN),
                          arrowprops={"arrowstyle": "->", "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0})
