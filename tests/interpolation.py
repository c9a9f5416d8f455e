"""Polynomials modulo P, lists of coefficients from the constant upwards, and the fraction that has given values."""
from reference.exact.degree import P


def trimmed(a):
    while a and not a[-1]:
        a = a[:-1]
    return a


def added(a, b, factor=1):
    """Return a + factor b."""
    length = max(len(a), len(b))
    a, b = a + [0] * (length - len(a)), b + [0] * (length - len(b))
    return trimmed([(x + factor * y) % P for x, y in zip(a, b)])


def times(a, b):
    result = [0] * (len(a) + len(b) - 1) if a and b else []
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            result[i + j] = (result[i + j] + x * y) % P
    return result


def divided(a, b):
    """Return the quotient and the remainder."""
    quotient, inverse = [0] * max(0, len(a) - len(b) + 1), pow(b[-1], -1, P)
    a = list(a)
    for i in reversed(range(len(quotient))):
        factor = quotient[i] = a[i + len(b) - 1] * inverse % P
        for j, y in enumerate(b):
            a[i + j] = (a[i + j] - factor * y) % P
    return trimmed(quotient), trimmed(a)


def interpolated(values):
    """Return the polynomial with these values at t = 1, 2, ... in Newton's form, and the product of all (t - i)."""
    polynomial, product = [], [1]
    for t, value in enumerate(values, 1):
        at = [sum(c * pow(t, i, P) for i, c in enumerate(x)) % P for x in (polynomial, product)]
        polynomial = added(polynomial, product, (value - at[0]) * pow(at[1], -1, P))
        product = times(product, [-t % P, 1])
    return polynomial, product


def degrees_of(values):
    """Return the degrees of the numerator and the denominator of the fraction with these values; None if there are too
    few of them.
    """
    remainder, before = interpolated(values)
    cofactor, cofactor_before = [1], []
    fractions = []
    while remainder:
        fractions.append((len(remainder) - 1, len(cofactor) - 1))
        quotient, rest = divided(before, remainder)
        before, remainder = remainder, rest
        cofactor_before, cofactor = cofactor, added(cofactor_before, times(quotient, cofactor), -1)
    if not fractions:
        return 0, 0
    found = min(fractions, key=sum)
    return found if sum(found) < len(values) - 3 else None
