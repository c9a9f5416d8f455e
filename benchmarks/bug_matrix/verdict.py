"""The verdict of a detector on a bug: seen, silent, or not applicable."""
from typing import NamedTuple

SEEN, SILENT, NOT_APPLICABLE = "seen", "silent", "not applicable"


class Verdict(NamedTuple):
    """A mark, the number of steps after which a bug was seen (0 if it is not seen in steps), and what was said."""

    mark: str
    step: int
    says: str


def seen(says: str, step: int = 0) -> Verdict:
    return Verdict(SEEN, step, says)


def silent(says: str) -> Verdict:
    return Verdict(SILENT, 0, says)


def not_applicable(why: str) -> Verdict:
    return Verdict(NOT_APPLICABLE, 0, why)
