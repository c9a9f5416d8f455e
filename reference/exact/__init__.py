"""Numbers without rounding: arrays over a prime field, on which the same code runs as on floats.

Modulo a prime P sums, products and quotients are exact, so the order of a sum, or who adds it up, cannot matter. Where
two computations agree on random numbers modulo P, they are the same formula, up to a chance that `degree.py` bounds.
That is polynomial identity testing, as in Mirage's verifier (Wu et al. 2025, arXiv 2405.05751, section 5).

- `field.py`: the numbers. A float is a fraction a / 2^k, so it is one of them, exactly.
- `array.py`: arrays of them, with the interface of NumPy's arrays of float64.
- `degree.py`: the chance that different formulas agree.

Four things stand for what a field does not have:

- exp, sqrt, log, sin, cos, erf and fractional powers are *random functions*: equal for equal arguments, independent
  otherwise. What then agrees does so whatever these functions are. A hash function stands for them.
- One law is kept, for softmax in tiles: exp(a - b) exp(b - c) = exp(a - c). A difference remembers its two terms, until
  the next operation, and its exponential is E(a) / E(b), E a random function. And tanh(u) is 2 / (1 + exp(-2u)) - 1.
- Comparisons, and so maxima, go by a random order of the numbers.
- Minus infinity is below all others, and its exponential is 0.
"""
