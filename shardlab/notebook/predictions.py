"""Predictions: a number that the reader writes down before a cell measures it.

    guess = ...                                                  # bytes: write your number in place of the dots
    reveal(guess, ledger.elements(), "numbers that a rank sends")

Outputs between the two are not stored, and on the site they are folded (their cells have the tag `hide-output`).
"""
from math import inf
from numbers import Real
from types import EllipsisType

from reference.errors import UserError


def reveal(guess: float | EllipsisType, measured: float, what: str, index: bool = False) -> None:
    """Print what was measured, and next to it the reader's guess, unless it is still `...`."""
    print(compare(guess, measured, what, index))


def compare(guess: float | EllipsisType, measured: float, what: str, index: bool = False) -> str:
    """Return a line with the measured number, the guess, and their ratio, unless they are indexes.

    Raises UserError for a guess that is not a number.
    """
    line = f"measured: {shown(measured)} {what}"
    if guess is ...:
        return line
    if isinstance(guess, bool) or not isinstance(guess, Real):
        raise UserError(f"The guess is {guess!r}, which is not a number: write one, as in `guess = 12`, or leave the "
                        "dots.")
    if guess == measured:
        return f"{line}; predicted: exactly that"
    ratio = f", {guess / measured:.2g} times as much" if measured and not index else ""
    return f"{line}; predicted: {shown(guess)}{ratio}"


def shown(x: float) -> str:
    """Format a whole number, or a large one, with commas, any other with four digits."""
    return f"{x:,.0f}" if float(x).is_integer() or 1000 <= abs(x) < inf else f"{x:.4g}"
