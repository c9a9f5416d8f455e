"""The chance that two different formulas agree on random numbers modulo P: a bound, and what it is made of.

All elements of an array are N_i / D, with one denominator D: polynomials in the inputs and in
the values of the random functions. `Degree` bounds their degrees through every operation.

Two different fractions differ by a polynomial of degree at most 2 M over another, M the largest bound of any array. A
polynomial that is not zero everywhere is zero at a random point with chance 2 M / P at most (Schwartz 1980; Zippel
1979). The same may happen to the arguments of any two of T values of random functions, which are then equal for no good
reason. So the chance that different formulas agree is at most (1 + T (T - 1) / 2) 2 M / P. It is that for all elements
together, since one that differs is enough to be seen. (Comparisons are of values of a random function, so their
outcomes are independent of the numbers: the proof is of the branches that were taken.)
"""
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil, floor

P = 2**127 - 2721      # (P - 1) / 2 is prime, too. So powers of two differ, and floats. (Modulo 2^127 - 1, 2^127 is 1.)


@dataclass(frozen=True)
class Degree:
    """A bound for an array's formulas N_i / D. D is a product of factors, each (name, degree), with its exponent.

    A factor is the product of an array's numerators, by all of which something was divided. Its name is a hash of the
    array's values, so that equal factors are recognized in two sums, and on two ranks. (Equal values may have been
    computed as other fractions N_i / D. The bounds hold for those in lowest terms, which equal values have in common.)
    """

    numerator: int = 0
    factors: dict[tuple[str, int], int] = field(default_factory=dict)      # which no one changes: bounds share them
    denominator: int = 0        # the degree of D, which is the sum over its factors

    def __mul__(self, other: "Degree") -> "Degree":
        """Return the bound of a product."""
        few, many = sorted((self.factors, other.factors), key=len)
        sums = {name: many.get(name, 0) + exponent for name, exponent in few.items()}
        return Degree(self.numerator + other.numerator, many | sums if sums else many,
                      self.denominator + other.denominator)

    def __or__(self, other: "Degree") -> "Degree":
        """Return the bound of a sum, and of an array with elements of both: over the least common denominator."""
        if self.factors is other.factors or self.factors == other.factors:
            return self if self.numerator >= other.numerator else other
        few, many = sorted((self, other), key=lambda x: len(x.factors))
        more = {name: exponent for name, exponent in few.factors.items() if exponent > many.factors.get(name, 0)}
        denominator = many.denominator + sum(name[1] * (exponent - many.factors.get(name, 0))
                                             for name, exponent in more.items())
        return Degree(max(x.numerator + denominator - x.denominator for x in (self, other)),
                      many.factors | more if more else many.factors, denominator)

    def inverse(self, elements: set[int]) -> "Degree":
        """Return the bound of 1 / x for an array x with this bound and these elements."""
        factor = len(elements) * self.numerator      # the degree of the product of the numerators
        if not factor:
            return Degree(self.denominator)
        name = blake2b(repr(sorted(elements)).encode(), digest_size=16).hexdigest()
        return Degree(self.denominator + factor - self.numerator, {(name, factor): 1}, factor)


CONSTANT, INPUT = Degree(0), Degree(1)


@dataclass
class Tally:
    """The computation so far, for the chance of error."""

    evaluations: int = 0      # of random functions
    degree: int = 0           # the largest of any array
    zero_divisors: int = 0    # that were met, while they are counted
    counts_zero_divisors: bool = False      # instead of raising: on ranks no one may leave while others wait

    def begin(self, counts_zero_divisors: bool = False) -> None:
        """Begin a computation."""
        self.evaluations = self.degree = self.zero_divisors = 0
        self.counts_zero_divisors = counts_zero_divisors

    def see(self, degree: Degree) -> None:
        """Note the bound of a result."""
        self.degree = max(self.degree, degree.numerator, degree.denominator)

    def see_zero_divisor(self) -> int:
        """Count a division by 0, and return a quotient that means nothing; or raise ZeroDivisionError."""
        if not self.counts_zero_divisors:
            raise ZeroDivisionError("A divisor is 0 modulo P. Draw other numbers.")
        self.zero_divisors += 1
        return 0

    def chance_of_error(self) -> float:
        """Return the bound that the module's docstring derives."""
        return (1 + self.evaluations * (self.evaluations - 1) // 2) * 2 * self.degree / P


def power_of_ten(exponent: float) -> str:
    """Format 10^exponent, rounded up to one digit: -14.6 -> '3e-15'. It may be smaller than any float."""
    whole = floor(exponent)
    digit = ceil(10 ** (exponent - whole))
    return f"{digit}e{whole}" if digit < 10 else f"1e{whole + 1}"


TALLY = Tally()
