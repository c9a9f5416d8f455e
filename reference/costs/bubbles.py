"""Idle time of a pipeline's ranks, as the papers' formulas.

p ranks, m microbatches a step, v stages on each rank. Narayanan et al. 2021 is 2104.04473 ("PTD-P"), Qi et al. 2023 is
2401.10241.
"""
from typing import NamedTuple


def bubble_fraction(p: int, m: int, v: int = 1) -> float:
    """Return idle / ideal time, (p - 1) / m for GPipe and 1F1B, 1/v of it interleaved (Narayanan et al. 2021, 2.2).

    A rank waits for p - 1 others to go first; with v stages on each, all of them are v times shorter.
    """
    return (p - 1) / (v * m)


class Bubbles(NamedTuple):
    """Idle time of a rank in a step, in the unit of F, I and W."""

    one_f_one_b: float
    zero_bubble_h1: float   # with 1F1B's peak of activations
    zero_bubble_h2: float   # with twice that, and where no optimizer step makes ranks wait


def bubbles(p: int, forward: float, input_gradient: float, weight_gradient: float) -> Bubbles:
    """Compute the bubbles from a stage's F, I and W for one microbatch (Qi et al. 2023, table 2; I is its B).

    Splitting the backward lets others go on after I: their wait is shorter by W, and the rest is filled with the
    delayed W. That fits exactly if W takes no longer than F, nor than I, and m is at least 2p: otherwise a W that fills
    a wait makes another rank wait.
    """
    one = forward + input_gradient
    return Bubbles((p - 1) * (one + weight_gradient), (p - 1) * (one - weight_gradient),
                   (p - 1) * (one - 2 * weight_gradient))
