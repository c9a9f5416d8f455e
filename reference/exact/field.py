"""A prime field: integers below P, differences that remember their terms, minus infinity, and random functions."""
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate

import numpy as np

from reference.exact.degree import TALLY, P


class Subtraction(int):
    """The result of a subtraction, which remembers its two terms. What is computed from it is a plain number."""

    terms: tuple[int, int]

    def __new__(cls, a, b):
        self = int.__new__(cls, (a - b) % P)
        self.terms = int(a), int(b)
        return self

    def __reduce__(self):
        return Subtraction, self.terms


class MinusInfinity:
    """The element below all others."""

    def __add__(self, other):
        return self

    __radd__ = __sub__ = __mod__ = __add__

    def __reduce__(self):
        return "MINUS_INFINITY"


MINUS_INFINITY = MinusInfinity()


def random_function(name: str, x: int) -> int:
    """Return the value at x of the random function of this name."""
    TALLY.evaluations += 1
    return int.from_bytes(blake2b(name.encode() + x.to_bytes(16), digest_size=24).digest()) % P


def difference(a, b):
    """Return a - b. Raise ArithmeticError if that would be infinite, or not a number."""
    if b is MINUS_INFINITY:
        raise ArithmeticError("Minus infinity cannot be subtracted: is every score of a row masked?")
    return a if a is MINUS_INFINITY else Subtraction(a, b)


def inverse(x: int) -> int:
    """Return 1 / x. Raise ZeroDivisionError for 0, by which nobody divides but by chance, or by mistake."""
    return reciprocal(x) if x else TALLY.see_zero_divisor()


@lru_cache(1 << 12)     # a row of a softmax has one divisor
def reciprocal(x: int) -> int:
    return pow(x, -1, P)


def inverses(xs: list[int]) -> list[int]:
    """Return 1 / x for each x: from one inverse, of their product, which takes as long as fifty products."""
    before = list(accumulate(xs, lambda x, y: x * y % P, initial=1))
    of_all = before.pop()
    if of_all == 0:
        return [inverse(x) for x in xs]
    found, rest = [], reciprocal(of_all)        # 1 / (the product of all up to x)
    for x, product in zip(reversed(xs), reversed(before), strict=True):
        found.append(rest * product % P)
        rest = rest * x % P
    return found[::-1]


def exp(x) -> int:
    """Return the exponential, by the one law that it obeys."""
    if x is MINUS_INFINITY:
        return 0
    if type(x) is Subtraction:
        a, b = x.terms
        return random_function("exp", a) * inverse(random_function("exp", b)) % P
    return random_function("exp", x)


def larger(a, b):
    """Return the one that comes later in the random order."""
    return a if place(a) >= place(b) else b


def place(x) -> int:
    """Return the place of a number in the random order."""
    return -1 if x is MINUS_INFINITY else random_function("order", x)


@lru_cache(4096)
def number(x):
    """Return the element for a Python or NumPy number. Raise ArithmeticError for infinity and for NaN."""
    if isinstance(x, (int, np.integer)):
        return int(x) % P
    if x == -np.inf:
        return MINUS_INFINITY
    if not np.isfinite(x):
        raise ArithmeticError(f"{x} is not a number modulo a prime.")
    numerator, denominator = float(x).as_integer_ratio()
    return numerator * pow(denominator, -1, P) % P
