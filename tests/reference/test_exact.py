"""Exact numbers: the laws of a field, and what stands for exp, order, minus infinity; arrays of them, as NumPy's; and
the chance of a false proof: no formula has a higher degree than its bound, and modulo small primes the bound holds.

Along a line through the space of all inputs and all values of random functions, each of them a + t b, a result is a
fraction of two polynomials in t. Whether its degrees are within the bounds is a linear system, of its values at many t.
"""
import pickle
from fractions import Fraction
from itertools import count
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from reference import ops
from reference.exact import array, degree, field
from reference.exact.array import ExactArray, as_exact, new, random_array
from reference.exact.degree import CONSTANT, INPUT, Tally
from reference.exact.field import MINUS_INFINITY, P
from reference.optimizers.adam import OptimizerConfig, adam_update
from tests.cases import close

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


def test_infinity_and_nan_are_no_numbers_and_nothing_is_divided_by_0():
    for x in (np.inf, np.nan):
        with pytest.raises(ArithmeticError, match="not a number"):
            X * x
    for zero, divided in ((X - X, 1), (X - X, X), (as_exact(np.zeros((2, 1))), X)):
        with pytest.raises(ZeroDivisionError, match="Draw other numbers"):
            divided / zero


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


# ---- arrays ---------------------------------------------------------------------------------------------------------


WHOLE = np.random.default_rng(0).integers(-9, 10, (2, 3, 4)).astype(float)
OTHER = np.random.default_rng(1).integers(1, 10, (2, 3, 4)).astype(float)
SAME_AS_NUMPYS = {
    "+ - *": lambda x, y: -x + y * 2 - 3 * y - x * y, "matmul of three axes": lambda x, y: x @ y.swapaxes(1, 2),
    "sum of an axis": lambda x, y: x.sum(-1, keepdims=True), "np.sum of axes": lambda x, y: np.sum(x, (0, 2)),
    "mean": lambda x, y: (4 * x).mean(-1), "vdot": np.vdot, "indices": lambda x, y: x[[1, 0], 1:, ::2],
    "where": lambda x, y: np.where(WHOLE > 0, x, 2.5), "with floats": lambda x, y: np.concatenate([x, OTHER]),
    "with whole": lambda x, y: np.concatenate([x, WHOLE.astype(int)]),
    "padded": lambda x, y: np.pad(x, [(0, 0), (1, 0), (0, 2)], constant_values=-1.5), "tril": lambda x, y: np.tril(x),
    "taken": lambda x, y: np.take_along_axis(x, np.array([[[3], [1], [0]]] * 2), -1),
    "like": lambda x, y: np.zeros_like(x) + np.ones_like(x) + np.full_like(x, y[0, 0, 0]),
    "arange": lambda x, y: np.arange(3.0, like=x) * x[0, 0, 0],
    "in place": lambda x, y: changed(x, y), "out": lambda x, y: written(x, y),
}


def changed(x, y):
    x += y
    x[1] *= 2
    x[:, 1:] -= 1.5
    x[0, 0] = y[1, 1]
    x[0, 1, 2] = y[1, 1, 0]
    x[1, 1:] = 7
    np.add.at(x, np.array([1, 1, 0]), y[0, 0])
    return x


def written(x, y):
    out = np.empty_like(x)
    np.multiply(x, y, out=out)
    np.copyto(out, 0, where=WHOLE > 3)
    np.put_along_axis(out, np.array([[[3], [1], [0]]] * 2), y[..., :1], -1)
    return out


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
    "float": float, "np.array": np.array, "abs": abs, "accumulate": np.add.accumulate,
    "into floats": lambda x: np.zeros(3).__setitem__(..., X[0]), "out": lambda x: np.add(x, x, out=np.zeros(())),
    "where=": lambda x: np.add(x, x, where=np.array(False)), "integers": lambda x: x.astype(np.int64),
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


VIEWS = {"slice": lambda x: x[:, 1:], "T": lambda x: x.T, "broadcast_to": lambda x: np.broadcast_to(x, (2, 2, 3)),
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


# ---- a computation along a line -------------------------------------------------------------------------------------


def a_plus_tb(t, *name):
    a, b = (int(random_array((), *name, which).elements.item()) for which in "ab")
    return (a + t * b) % P


class Line:
    """Inputs and random functions with values on a line. The order of numbers is the same everywhere on it."""

    def __init__(self, t):
        self.t, self.names, self.seen = t, count(), {}

    def array(self, *shape):
        x = np.empty(shape, object)
        for i in np.ndindex(shape):
            x[i] = a_plus_tb(self.t, "input", next(self.names))
        return new(x, INPUT)

    def random_function(self, name, x):
        """Replace field.random_function. Arguments are known by the number of different ones before them."""
        which = self.seen.setdefault((name, x), len(self.seen))
        return a_plus_tb(0 if name == "order" else self.t, "function", which)


def on_a_line(compute, t):
    line = Line(t)
    with mock.patch.object(field, "random_function", line.random_function):
        return compute(line)


def degree_is_within_the_bound(compute, most=160) -> bool | None:
    """Report whether v(t), a random sum of all elements of compute(line), is a fraction N/D of polynomials with degrees
    within the bounds: N(t) = v(t) D(t) has a solution at twice as many t as there are coefficients. Of too many: None.
    """
    x = on_a_line(compute, 1)
    n, d = x.bound.degree.numerator, x.bound.degree.denominator
    if n + d > most:
        return None
    rows, weights = [], random_array(x.shape, "weights").elements
    for t in range(1, 2 * (n + d + 2)):
        v = int((weights * on_a_line(compute, t).elements).sum() % P)
        rows.append([pow(t, i, P) for i in range(n + 1)] + [-v * pow(t, i, P) % P for i in range(d + 1)])
    return rank_of(rows) < n + d + 2


def rank_of(rows: list[list[int]]) -> int:
    """Return the rank of a matrix modulo P."""
    found = 0
    for column in range(len(rows[0])):
        if (pivot := next((row for row in rows if row[column]), None)) is not None:
            rows.remove(pivot)
            found, inverse = found + 1, pow(pivot[column], -1, P)
            rows = [[(x - row[column] * inverse * y) % P for x, y in zip(row, pivot)] if row[column] else row
                    for row in rows]
    return found


MASK = np.array([[True, False], [False, True]])


def written_over(x, y):
    x = x.copy()
    x[0] = y[1]
    x[1, 1] = 2.5
    x[1, 0] += y[0, 0]
    return x


def last_added(rows):
    return rows[:-1] + rows[-1]


def gradients_of_attention(x, y):
    y, cache = ops.attention_core(*(z.reshape(1, 2, 1, 2) for z in (x, y, x)), causal=True)
    return sum(ops.attention_core_backward(y, cache)).reshape(2, 2)


def two_steps_of_adam(x, y):
    states = [x.copy(), np.zeros_like(x), np.zeros_like(x)]
    for step in (1, 2):
        grad = y * (0.5 / (np.sqrt(np.vdot(y, y)) + 1e-6))
        adam_update(states[0], grad, *states[1:], step, 0.1, True, OptimizerConfig(0.1, 5))
    return states[0]


STEPS = {
    "+": lambda x, y: x + y, "*": lambda x, y: x * y, "/": lambda x, y: x / y, "1 /": lambda x, y: 1 / x,
    "/ of a column": lambda x, y: x / y[:, :1], "@": lambda x, y: x @ y, "square": lambda x, y: x**2,
    "exp of a difference": lambda x, y: np.exp(x - y), "maximum": lambda x, y: np.maximum(x, y),
    "exp of a difference, or not": lambda x, y: np.exp(np.where(MASK, x - y, y)), "sqrt": lambda x, y: np.sqrt(x),
    "where, else a number": lambda x, y: last_added(np.where([[True], [True], [False]], x[[0, 1, 0]], 3.5)),
    "pad": lambda x, y: last_added(np.pad(x, [(0, 1), (0, 0)], constant_values=2.0)),
    "beside numbers": lambda x, y: last_added(np.concatenate([x, [[1.5, 2.5]]])), "in place": written_over,
    "sum": lambda x, y: x + y.sum(-1, keepdims=True), "softmax": lambda x, y: ops.softmax(x),
    "layer norm": lambda x, y: ops.layer_norm(x, y[0], y[1], 0.5)[0],
    "cross-entropy": lambda x, y: ops.cross_entropy(x[None], np.array([[1, 0]]))[0][0, :, None] * y,
    "attention's gradients": gradients_of_attention, "Adam": two_steps_of_adam,
}


@st.composite
def programs(draw):
    """Draw steps: a name, and the numbers of the two arrays that it takes, of all before."""
    return [(draw(st.sampled_from(sorted(STEPS))), draw(st.integers(0, i)), draw(st.integers(0, i)))
            for i in range(1, 1 + draw(st.integers(1, 5)))]


def run(program, line):
    xs = [line.array(2, 2), line.array(2, 2)]
    for name, i, j in program:
        xs.append(STEPS[name](xs[i], xs[j]))
    return xs[-1]


@given(programs())
def test_no_program_has_a_higher_degree(program):
    try:
        found = degree_is_within_the_bound(lambda line: run(program, line), most=25)
    except ZeroDivisionError:
        found = None
    assume(found is not None)
    assert found


SAMPLES = {
    **{name: [(name, 0, 1)] for name in STEPS}, "a fraction upside down": [("/", 0, 1), ("1 /", 2, 2)],
    **{f"a number among fractions: {step}": [("1 /", 0, 0), (step, 2, 2)]
       for step in ("where, else a number", "pad", "beside numbers", "in place")},
}


@pytest.mark.parametrize("program", SAMPLES.values(), ids=SAMPLES)
def test_no_sample_has_a_higher_degree(program):
    assert degree_is_within_the_bound(lambda line: run(program, line))


# ---- the chance, where it is large enough to be seen ----------------------------------------------------------------


@pytest.fixture
def small_prime(monkeypatch):
    """Compute modulo 1009. What was computed modulo another number is forgotten, before and after."""
    kept = field.number, field.reciprocal
    for module in (degree, field, array):
        monkeypatch.setattr(module, "P", 1009)
    for one in kept:
        one.cache_clear()
    yield 1009
    for one in kept:
        one.cache_clear()


def product_of_differences(x, y):
    return np.stack([(x - i) * (x - i - 1) for i in range(0, 8, 2)])


def product(xs):
    return xs[0] * product(xs[1:]) if len(xs) > 1 else xs[0]


def nested(x, depth=30):
    return nested(np.sqrt(x), depth - 1) if depth else x


DIFFERENT = {
    "a function of a function, and so on": lambda x, y: (nested(x[0]), nested(y[0])),
    "a product that is 0 at eight places": lambda x, y: (product(product_of_differences(x[0], y)), x[0] * 0),
    "two elements of a softmax": lambda x, y: tuple(ops.softmax(x)[:2]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_formulas_agree_no_more_often_than_the_bound_says(name, small_prime, monkeypatch):
    """In 1000 draws; and where they do agree now and then, they are seen to."""
    agreed, draws, chances = 0, 0, []
    for seed in range(1000):
        tally = Tally()
        for module in (field, array):
            monkeypatch.setattr(module, "TALLY", tally)
        try:
            ours, theirs = DIFFERENT[name](random_array(4, seed, "x"), random_array(4, seed, "y"))
        except ZeroDivisionError:
            continue
        draws, agreed = draws + 1, agreed + int((ours == theirs).item())
        chances.append(tally.chance_of_error())
    expected = draws * max(chances)
    assert draws > 900 and agreed <= expected + 3 * np.sqrt(expected)
    assert agreed > 0


def test_degrees_of_numbers_inputs_and_equal_denominators():
    """A sum over a row of a softmax has the degree of its terms, on whatever rank its parts were made."""
    x, y = random_array(5, "x"), random_array(5, "y")
    assert as_exact(np.ones(2)).bound.degree == CONSTANT
    assert all(number.bound.degree == INPUT for number in (x, x + 1.5, 3 * x, x / 3))
    probs, again = ops.softmax(x), ops.softmax(x)
    assert (probs + again).bound.degree == probs.bound.degree == probs.sum().bound.degree
    assert (probs + ops.softmax(y)).bound.degree.denominator == 2 * probs.bound.degree.denominator
