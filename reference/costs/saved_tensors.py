"""Activations that wait for a backward: the tensors, a stage's bytes, and the peak of a rank with several stages."""
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from reference.schedules.actions import Action


class SavedTensor(NamedTuple):
    """Arrays that wait for a microbatch's backward on one rank, with the papers' formula for them."""

    what: str
    elements: int
    bytes: int       # ours
    paper: float     # theirs: 2 for an element of an activation, 1 for one of a mask
    why: str         # why the two differ; "" if they do not


class StageBytes(NamedTuple):
    """Bytes of one microbatch on one rank: a stage's layers, and the embedding and the head if it has them."""

    kept: int         # from F until B, or until I
    deferred: int     # from I until W


def total(items: Iterable[SavedTensor]) -> int:
    """Sum our bytes."""
    return sum(item.bytes for item in items)


def peak_activations(stages: Mapping[int, StageBytes], actions: Sequence[Action]) -> int:
    """Return the peak bytes on a rank that does these actions on these stages, in this order."""
    held = peak = 0
    for action in actions:
        kept, deferred = stages[action.stage]
        held += {"F": kept, "B": -kept, "I": deferred - kept, "W": -deferred}[action.kind]
        peak = max(peak, held)
    return peak
