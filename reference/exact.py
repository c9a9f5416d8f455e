"""Numbers without rounding: arrays over a prime field, on which the same code runs as on floats.

Modulo a prime P sums, products and quotients are exact, so the order of a sum, or who adds it up, cannot matter. Where
two computations of this textbook agree on random numbers modulo P, they are the same formula, up to a chance that is
stated below. That is polynomial identity testing (Schwartz 1980; Zippel 1979), as in Mirage's verifier (Wu et al. 2025,
arXiv 2405.05751, section 5). An ExactArray has the interface of a NumPy array of float64, by NumPy's dispatch.

- A float is a fraction a / 2^k, so it is one number modulo P, exactly.
- exp, tanh, sqrt, log, sin, cos, erf and fractional powers are *random functions*: equal for equal arguments,
  independent otherwise. What then agrees does so whatever these functions are. A hash function stands for them.
- One law is kept, for softmax in tiles: exp(a - b) exp(b - c) = exp(a - c). A difference remembers its two terms, until
  the next operation, and its exponential is E(a) / E(b), E a random function. And tanh(u) is 2 / (1 + exp(-2u)) - 1.
- Comparisons, and so maxima, go by a random order of the numbers. Minus infinity is below all; its exponential is 0.

The chance that different formulas agree. All elements of an array are N_i / D, with one denominator D: polynomials in
the inputs and in the values of the random functions. `Degree` bounds their degrees through every operation. Two
fractions differ by a polynomial of degree at most 2 M, M the largest bound; unless it is zero everywhere, it is zero at
a random point with chance 2 M / P at most. The same may happen to the arguments of any two of T values of random
functions, which are then equal for no good reason. So the chance is at most (1 + T (T - 1) / 2) 2 M / P: for all
elements together, since one that differs is enough to be seen. (Comparisons are of random functions' values, too, so
their outcome is independent of the numbers: the proof is of the branches that were taken.)
"""
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

import numpy as np

P = 2**127 - 1      # a Mersenne prime

# ---- degrees --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Degree:
    """A bound for an array's formulas N_i / D. D is a product of factors, each (name, degree), with its exponent.

    A factor is the product of an array's numerators, by all of which something was divided. Its name is a hash of the
    array's values, so that equal factors are recognized in two sums, and on two ranks.
    """

    numerator: int = 0
    factors: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def denominator(self) -> int:
        return sum(degree * exponent for (_, degree), exponent in self.factors.items())

    def __mul__(self, other: "Degree") -> "Degree":
        """Return the bound of a product."""
        factors = {name: self.factors.get(name, 0) + other.factors.get(name, 0) for name in self.factors | other.factors}
        return Degree(self.numerator + other.numerator, factors)

    def __or__(self, other: "Degree") -> "Degree":
        """Return the bound of a sum, and of an array with elements of both: over the least common denominator."""
        if self is other or not (other.numerator or other.factors):
            return self
        common = {name: max(self.factors.get(name, 0), other.factors.get(name, 0))
                  for name in self.factors | other.factors}
        whole = Degree(0, common).denominator
        return Degree(max(x.numerator + whole - x.denominator for x in (self, other)), common)

    def inverse(self, elements) -> "Degree":
        """Return the bound of 1 / x for an array x with this bound, from the set of its elements."""
        factor = len(elements) * self.numerator
        if not factor:
            return Degree(self.denominator)
        return Degree(self.denominator + factor - self.numerator, {(hash(frozenset(elements)), factor): 1})


@dataclass
class Tally:
    """What was computed so far, for the chance of error."""

    evaluations: int = 0      # of random functions
    degree: int = 0           # the largest of any array

    def chance_of_error(self) -> float:
        """Return the bound that the module's docstring derives."""
        return (1 + self.evaluations * (self.evaluations - 1) // 2) * 2 * self.degree / P


TALLY = Tally()


# ---- elements: integers below P, of which some are differences; and minus infinity ----------------------------------


class Difference(int):
    """A number that remembers of which two numbers it is the difference. What is computed from it is a plain number."""

    def __new__(cls, a, b):
        self = super().__new__(cls, (a - b) % P)
        self.terms = int(a), int(b)
        return self

    def __reduce__(self):
        return Difference, self.terms


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
    return int.from_bytes(blake2b(x.to_bytes(16), digest_size=24, person=name.encode()).digest()) % P


def difference(a, b):
    """Return a - b. Raise ArithmeticError if that would be infinite, or not a number."""
    if b is MINUS_INFINITY:
        raise ArithmeticError("Minus infinity cannot be subtracted: is every score of a row masked?")
    return a if a is MINUS_INFINITY else Difference(a, b)


def inverse(x: int) -> int:
    """Return 1 / x. Raise ZeroDivisionError for 0, by which nobody divides but by chance, or by mistake."""
    if x == 0:
        raise ZeroDivisionError("A divisor is 0 modulo P. Draw other numbers.")
    return pow(x, -1, P)


def exp(x) -> int:
    if x is MINUS_INFINITY:
        return 0
    if type(x) is Difference:
        a, b = x.terms
        return random_function("exp", a) * inverse(random_function("exp", b)) % P
    return random_function("exp", x)


def tanh(x: int) -> int:
    return (2 * inverse(1 + exp(-2 * x % P)) - 1) % P


def power(x: int, n) -> int:
    """Return x^n, n an integer or a float: a random function where n is no whole number, as is a float to the x."""
    return pow(x, n, P) if isinstance(n, int) else random_function(f"^{n}", x)


def larger(a, b):
    return a if place(a) >= place(b) else b


def place(x) -> int:
    """Return the place of a number in the random order."""
    return -1 if x is MINUS_INFINITY else random_function("order", x)


@lru_cache(4096)
def number(x):
    """Return the element for a Python or NumPy number. Raise ArithmeticError for infinity, and for what is no number."""
    if isinstance(x, (int, np.integer)):
        return int(x) % P
    if x == -np.inf:
        return MINUS_INFINITY
    if not np.isfinite(x):
        raise ArithmeticError(f"{x} is no number modulo a prime.")
    numerator, denominator = float(x).as_integer_ratio()
    return numerator * pow(denominator, -1, P) % P


def elementwise(function, count=1):
    """Return a function of Python numbers as one of arrays of Python objects."""
    return np.frompyfunc(function, count, 1)


def named(name: str):
    return elementwise(lambda x: random_function(name, x))


def compared(ufunc):
    """Return a comparison of arrays, by the random order."""
    places = elementwise(place)
    return lambda a, b: ufunc(places(a), places(b)).astype(bool)
