"""Exact numbers: the laws of a field, and what stands for exp, order, minus infinity; and arrays of them as NumPy's."""
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference import ops
from reference.exact import array, field
from reference.exact.array import ExactArray, as_exact, new, random_array
from reference.exact.degree import Tally
from reference.exact.field import MINUS_INFINITY, P
from tests.strategies import close

NUMBERS = st.sampled_from([0, 1, 2, P - 1]) | st.integers(0, P - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
X, Y = random_array((2, 3), "x"), random_array((2, 3), "y")


def exact(*numbers):
    """Return an array of these numbers."""
    return new(np.array(numbers, object))


def equal(x, y) -> bool:
    return bool((x == y).all())


def element(fraction: Fraction):
    """Return the number modulo P that a fraction is."""
    return exact(fraction.numerator % P * pow(fraction.denominator, -1, P) % P)


# ---- the field ------------------------------------------------------------------------------------------------------


@given(NUMBERS, NUMBERS, NUMBERS)
def test_the_laws_of_a_field(a, b, c):
    x, y, z = exact(a), exact(b), exact(c)
    assert equal(x + y, y + x) and equal(x * y, y * x)
    assert equal((x + y) + z, x + (y + z)) and equal((x * y) * z, x * (y * z))
    assert equal(x * (y + z), x * y + x * z)
    assert equal(x + 0, x) and equal(x * 1, x) and equal(x + -x, exact(0)) and equal((x - y) + y, x)
    if b:
        assert equal(x / y * y, x) and equal(x / y, x * (1 / y))
    assert equal(x**3, x * x * x)


@given(FLOATS, FLOATS)
def test_a_float_is_the_fraction_that_it_is(x, y):
    """Sums, products and quotients are those of the fractions, not of the floats; and no two floats are one number."""
    a, b, u, v = as_exact([x]), as_exact([y]), Fraction(x), Fraction(y)
    assert equal(a, element(u)) and equal(a + b, element(u + v)) and equal(a * b, element(u * v))
    if y:
        assert equal(a / b, element(u / v))
    assert equal(a, b) == (x == y)


def test_no_power_of_two_is_another():
    """A float is a whole number times one of them. Modulo 2^127 - 1, 2^127 would be 1."""
    assert len({field.number(2.0**n) for n in range(-1074, 1024)}) == 2098


@pytest.mark.parametrize("x", [np.inf, np.nan])
def test_infinity_and_nan_are_no_numbers(x):
    with pytest.raises(ArithmeticError, match="no number"):
        X * x


@pytest.mark.parametrize("divide", [lambda x: 1 / x, lambda x: x / x, lambda x: X / x[:, :1]])
def test_to_divide_by_0_is_an_error(divide):
    with pytest.raises(ZeroDivisionError, match="Draw other numbers"):
        divide(X - X)


@given(st.lists(NUMBERS.filter(bool), max_size=9))
def test_inverses_of_many_numbers_are_those_of_each(xs):
    """A 0 among them is a division by 0, however many others there are."""
    assert field.inverses(xs) == [pow(x, -1, P) for x in xs]
    with pytest.raises(ZeroDivisionError):
        field.inverses([*xs, 0, 2])


# ---- functions ------------------------------------------------------------------------------------------------------


FUNCTIONS = {"exp": np.exp, "sqrt": np.sqrt, "log": np.log, "sin": np.sin, "cos": np.cos, "erf": ops.erf,
             "root": lambda x: x**0.5, "tanh": np.tanh, "power": lambda x: 10.0**x, "thirds": lambda x: x**(-2 / 3)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_equal_for_equal_arguments_only(name):
    function = FUNCTIONS[name]
    assert equal(function(X), function((X * Y) / Y))
    assert not (function(X) == function(X + 2.0**-60)).any()
    assert not any((function(X) == other(X)).any() for key, other in FUNCTIONS.items() if key != name)


def test_exp_has_its_law_and_no_other():
    x, y, z = (random_array(4, name) for name in "xyz")
    close(np.exp(x - y) * np.exp(y - z), np.exp(x - z))
    close(np.exp(x - x), as_exact(np.ones(4)))
    close(np.exp(x - y), np.exp(x) / np.exp(y))
    assert not (np.exp(x + y) == np.exp(x) * np.exp(y)).any()
    assert not (np.exp((x - y) * 1) == np.exp(x - y)).any(), "a product remembers of what it was the difference"
    close(np.tanh(x), (1 - np.exp(-2 * x)) / (1 + np.exp(-2 * x)))


def test_minus_infinity_is_below_all_and_its_exponential_is_0():
    x = np.where([False, True, False], random_array(3, "x"), -np.inf)
    assert ((x == -np.inf) == [True, False, True]).all() and (np.isfinite(x) == [False, True, False]).all()
    close(np.exp(x), np.where([False, True, False], np.exp(x), 0.0))
    close(x + 3.0, x + 3.0)
    assert ((x + 3.0 == -np.inf) == [True, False, True]).all()
    close(x.max(0), x[1])
    assert (x[::2] < random_array(2, "y")).all() and (x[::2] < -1e300).all()
    with pytest.raises(ArithmeticError, match="every score of a row masked"):
        x - x
    assert pickle.loads(pickle.dumps(MINUS_INFINITY)) is MINUS_INFINITY


@given(NUMBERS, NUMBERS, NUMBERS)
def test_the_order_is_total(a, b, c):
    """Comparisons, the maximum and argmax are about one order; it has nothing to do with the numbers' size."""
    x, y, z = exact(a), exact(b), exact(c)
    assert (x < y)[0] + (x == y)[0] + (x > y)[0] == 1 and (x <= y)[0] == (not (x > y)[0])
    assert not (x < y)[0] or not (y < z)[0] or (x < z)[0]
    highest = np.maximum(np.maximum(x, y), z)
    assert equal(highest, np.maximum(x, np.maximum(z, y)))
    together = exact(a, b, c)
    for one in (together.max(0), np.max(together, 0), together[np.argmax(together)], np.maximum.reduce(together)):
        assert equal(one, highest[0])
    assert (highest >= together).all()


def test_the_order_is_not_that_of_the_numbers():
    numbers = exact(*range(1000))
    above = (numbers[1:] > numbers[:-1]).sum()
    assert 400 < above < 600


# ---- arrays ---------------------------------------------------------------------------------------------------------


WHOLE = np.random.default_rng(0).integers(-9, 10, (2, 3, 4)).astype(float)
OTHER = np.random.default_rng(1).integers(1, 10, (2, 3, 4)).astype(float)
SAME_AS_NUMPYS = {
    "+ - *": lambda x, y: x + y * 2 - 3 * y - x * y, "negative": lambda x, y: -x,
    "matmul": lambda x, y: x[0] @ y[0].T, "matmul of three axes": lambda x, y: x @ y.swapaxes(1, 2),
    "sum": lambda x, y: x.sum(), "sum of an axis": lambda x, y: x.sum(-1, keepdims=True),
    "np.sum of axes": lambda x, y: np.sum(x, (0, 2)), "add.reduce": lambda x, y: np.add.reduce(x),
    "mean": lambda x, y: (4 * x).mean(-1), "vdot": np.vdot, "indices": lambda x, y: x[[1, 0], 1:, ::2],
    "transposed": lambda x, y: x[1].T, "reshaped": lambda x, y: x.reshape(-1, 2), "iterated": lambda x, y: [*x][1],
    "where": lambda x, y: np.where(WHOLE > 0, x, 2.5), "where, whole": lambda x, y: np.where(WHOLE > 0, x, -1),
    "concatenated": lambda x, y: np.concatenate([x, y], -1), "with floats": lambda x, y: np.concatenate([x, OTHER]),
    "with whole": lambda x, y: np.concatenate([x, WHOLE.astype(int)]),
    "stacked": lambda x, y: np.stack([x, y]), "split": lambda x, y: np.split(x, 2, -1)[1],
    "padded": lambda x, y: np.pad(x, [(0, 0), (1, 0), (0, 2)], constant_values=-1.5),
    "repeated": lambda x, y: np.repeat(x, 2, 1), "broadcast": lambda x, y: np.broadcast_to(x[:, :1], x.shape),
    "taken": lambda x, y: np.take_along_axis(x, np.array([[[3], [1], [0]]] * 2), -1), "tril": lambda x, y: np.tril(x),
    "like": lambda x, y: np.zeros_like(x) + np.ones_like(x) + np.full_like(x, 2.5), "copied": lambda x, y: np.copy(x),
    "full": lambda x, y: np.full_like(x, y[0, 0, 0]), "arange": lambda x, y: np.arange(3.0, like=x) * x[0, 0, 0],
    "cast": lambda x, y: x.astype(np.float32), "masked sum": lambda x, y: (x * (WHOLE > 0)).sum(0),
    "in place": lambda x, y: changed(x, y), "added at": lambda x, y: added_at(x, y), "out": lambda x, y: written(x, y),
    "put": lambda x, y: put(x, y), "list": lambda x, y: np.array([x[0, 0], y[0, 0]], like=x),
}


def changed(x, y):
    x += y
    x[1] *= 2
    x[:, 1:] -= 1.5
    x[0, 0] = y[1, 1]
    x[0, 1, 2] = y[1, 1, 0]
    x[1, 1:] = 7
    return x


def added_at(x, y):
    np.add.at(x, np.array([1, 1, 0]), y[0, 0])
    return x


def written(x, y):
    out = np.empty_like(x)
    np.multiply(x, y, out=out)
    np.copyto(out, 0, where=WHOLE > 3)
    return out


def put(x, y):
    np.put_along_axis(x, np.array([[[3], [1], [0]]] * 2), y[..., :1], -1)
    return x


@pytest.mark.parametrize("name", SAME_AS_NUMPYS)
def test_arrays_do_what_numpys_do(name):
    """On floats that are whole numbers or halves, which NumPy's arithmetic does not round."""
    function = SAME_AS_NUMPYS[name]
    found = function(as_exact(WHOLE.copy()), as_exact(OTHER.copy()))
    expected = function(WHOLE.copy(), OTHER.copy())
    assert isinstance(found, ExactArray)
    close(found, as_exact(expected))
    assert all(type(x) in (int, field.Subtraction) and 0 <= x < P for x in found.elements.ravel())


ESCAPES = {
    "float": float, "int": int, "bool": bool, "math.sqrt": math.sqrt, "np.array": lambda x: np.array(x),
    "np.array of a list": lambda x: np.array([x, x]), "np.float64": np.float64, "format": lambda x: f"{x:.2f}",
    "into floats": lambda x: np.zeros(3).__setitem__(..., X[0]), "out": lambda x: np.add(x, x, out=np.zeros(())),
    "abs": abs, "round": round, "np.mean": np.mean, "np.std": np.std, "np.cumsum": np.cumsum, "np.prod": np.prod,
    "np.linalg.norm": np.linalg.norm, "accumulate": np.add.accumulate, "sign": np.sign, "//": lambda x: x // 2,
    "where=": lambda x: np.add(x, x, where=np.array(False)), "initial=": lambda x: np.add.reduce(x, initial=1.0),
    "full of it": lambda x: np.full(3, x), "integers": lambda x: x.astype(np.int64),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_what_would_leave_the_field_is_refused(name):
    with pytest.raises(TypeError):
        ESCAPES[name](X[0, 0] * 1)


def test_pickling_keeps_numbers_and_their_history():
    x, y = pickle.loads(pickle.dumps((X - Y, np.where([[True], [False]], X, -np.inf))))
    close(np.exp(x), np.exp(X - Y))
    assert (y[1] == -np.inf).all() and y.bound.degree == np.where([[True], [False]], X, -np.inf).bound.degree


def test_names_make_independent_numbers():
    drawn = [random_array(100, *name) for name in [(1, "x"), (2, "x"), (1, "y"), ("x", 1), (1,)]]
    assert len({x for one in drawn for x in one.elements}) == 500
    close(random_array(100, 1, "x"), drawn[0])


VIEWS = {"index": lambda x: x[1], "slice": lambda x: x[:, 1:], "reshape": lambda x: x.reshape(-1),
         "T": lambda x: x.T, "swapaxes": lambda x: x.swapaxes(0, 1), "split": lambda x: np.split(x, 3, 1)[1],
         "broadcast_to": lambda x: np.broadcast_to(x, (2, 2, 3)), "expand_dims": lambda x: np.expand_dims(x, 0),
         "view of a view": lambda x: np.split(x[1].reshape(3, 1), 3)[0]}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_the_bound_of_what_is_written(name):
    """Whether through the view or through the whole."""
    whole = X.copy()
    view, high = VIEWS[name](whole), X[1, 1]**9
    if view.elements.flags.writeable:
        view[...] = high
        assert whole.bound.degree.numerator == 9 and X.bound.degree.numerator == 1
    whole[...] = high * high
    assert view.bound.degree.numerator == 18 and (view == high * high).all()


@pytest.mark.parametrize("write", [
    lambda x, y: x.__setitem__(0, y[0]), lambda x, y: x.__iadd__(y), lambda x, y: np.add.at(x, [0], y[:1]),
    lambda x, y: np.copyto(x, y), lambda x, y: np.put_along_axis(x, np.array([[0]]), y[:1, :1], -1),
    lambda x, y: np.multiply(x, y, out=x)])
def test_what_is_written_in_place_is_counted(monkeypatch, write):
    """In the array's bound, and in the tally, even if nothing is computed from it."""
    x, y, tally = X**9, 1 / Y, Tally()
    monkeypatch.setattr(array, "TALLY", tally)
    write(x, y)
    assert x.bound.degree.numerator >= 9 + 6 and x.bound.degree.denominator == 6
    assert tally.degree >= x.bound.degree.numerator
