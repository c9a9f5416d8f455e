"""A check that two recordings are complete: a comparison skips tensors that one of them lacks."""
from math import prod

import numpy as np

from reference.errors import UserError
from shardlab.compare.names import Key
from shardlab.compare.recording import Recording, TensorPart, whole_shape

RECORD_AGAIN = "its recording is not complete, so agreement would say little. Record it again, to its end."


def check_whole(a: Recording, b: Recording, names: tuple[str, str] = ("A", "B"), advice: str = RECORD_AGAIN,
                tensors: bool = True) -> None:
    """Raise UserError for iterations, tensors, or parts of a tensor that one of two recordings of a run lacks."""
    iterations = [sorted({key.iteration for key in one.parts}) for one in (a, b)]
    if iterations[0] != iterations[1]:
        raise UserError(f"{names[0]} has recorded {format_iterations(iterations[0])}, but {names[1]} "
                        f"{format_iterations(iterations[1])}. "
                        "Record both to the same iteration.")
    for name, one, other in ((names[0], a, b), (names[1], b, a)):
        if tensors and (keys := lacking(one, other)):
            raise UserError(f"{name} lacks a tensor that the other run has, {keys[0]}: {advice}")
        for key, parts in one.parts.items():
            if not covers(parts, whole_shape([*parts, *other.parts.get(key, [])])):
                raise UserError(f"{name} lacks a part of {key}: {advice}")


def lacking(one: Recording, other: Recording) -> list[Key]:
    """Return the tensors of the other run that this one should have too, in order."""
    return sorted((key for key in other.parts.keys() - one.parts.keys() if not may_lack(one, key)),
                  key=lambda key: key.order)


def may_lack(recording: Recording, key: Key) -> bool:
    """Report whether a run on this topology may lack a tensor that others have."""
    parallel = recording.about.parallel
    site = key.name.split(".", 2)[-1] if key.layer is not None else key.name
    if key.phase == "recompute" or (key.layer is not None and site == "input"):
        return True                                # recomputed tensors, and those sent to a stage
    if key.phase == "gradients":
        return parallel.zero_stage >= 2         # each microbatch's are reduced and freed
    if site in ("attention.probs", "attention.probs_mask"):
        return key.phase == "forward"              # not kept by every kernel, nor by selective recompute
    return key.phase == "forward" and parallel.recompute.granularity == "full"


def covers(parts: list[TensorPart], shape: tuple[int, ...]) -> bool:
    """Report whether every element of the whole is in a part. Check the parts' sizes before making such an array."""
    if prod(shape) > sum(prod(part.shape) for part in parts) or any(len(part.shape) != len(shape) for part in parts):
        return False
    there = np.zeros(shape, bool)
    for part in parts:
        there[part.box] = True
    return bool(there.all())


def format_iterations(iterations: list[int], word: str = "iteration") -> str:
    """Format a list: [1, 2] -> 'iterations 1 and 2'."""
    *others, last = map(str, iterations)
    return f"{word}s {', '.join(others)} and {last}" if others else f"{word} {last}"
