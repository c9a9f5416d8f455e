"""The error function, which NumPy does not have."""
from math import pi, sqrt

import numpy as np

# Rational functions for erf, by W. J. Cody, "Rational Chebyshev Approximations for the Error Function", 1969: in x^2
# where |x| <= 0.46875, in |x| up to 4, in 1/x^2 beyond. Coefficients from the highest power down.
ERF_SMALL = ((1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
              3.20937758913846947e3),
             (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3))
ERFC_MIDDLE = ((2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
                2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
                1.23033935479799725e3),
               (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
                3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3))
ERFC_LARGE = ((1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
               1.60837851487422766e-2, 6.58749161529837803e-4),
              (1.0, 2.56852019228982242e0, 1.87295284992346047e0, 5.27905102951428412e-1, 6.05183413124413191e-2,
               2.33520497626869185e-3))


def erf(x):
    """Compute the error function to the rounding of x's dtype."""
    if hasattr(x, "erf"):                                             # exact numbers have one, of no particular values
        return x.erf()
    size = np.minimum(abs(x), 6)                                      # erf(6) is 1 in float64
    middle, square = np.maximum(size, 0.46875), size * size
    inverse = 1 / (middle * middle)
    near = x * ratio(ERF_SMALL, np.minimum(square, 0.46875**2))
    tail = np.where(size <= 4, ratio(ERFC_MIDDLE, middle),
                    (1 / sqrt(pi) - inverse * ratio(ERFC_LARGE, inverse)) / middle)
    return np.where(size <= 0.46875, near, np.sign(x) * (1 - np.exp(-square) * tail))


def ratio(coefficients, x):
    """Divide one polynomial by another, both by Horner's rule."""
    numerator, denominator = (np.full_like(x, first) for first, *_ in coefficients)
    for a, b in zip(coefficients[0][1:], coefficients[1][1:]):
        numerator, denominator = numerator * x + a, denominator * x + b
    return numerator / denominator
