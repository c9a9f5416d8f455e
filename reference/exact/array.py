"""Arrays of numbers modulo a prime, which NumPy takes for arrays of float64 of another library."""
from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import or_
from random import Random
from typing import Any

import numpy as np

from reference.exact import field
from reference.exact.degree import CONSTANT, INPUT, TALLY, Degree
from reference.exact.field import MINUS_INFINITY, P


class Bound:
    """The Degree of all arrays that may share memory."""

    def __init__(self, degree: Degree):
        self.degree = degree
        TALLY.see(degree)

    def include(self, degree: Degree) -> None:
        """Note that elements with this bound were written into the memory."""
        self.degree |= degree
        TALLY.see(self.degree)


class ExactArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of numbers modulo P, in place of one of float64. Indices and masks next to it are NumPy's.

    It raises TypeError where its elements would become floats, and ZeroDivisionError where a divisor is 0 modulo P.
    """

    dtype, itemsize = np.dtype(np.float64), 8      # of the floats that it stands for

    def __init__(self, elements: np.ndarray, bound: Bound):
        """Wrap an array of Python objects: integers below P, Subtractions and MINUS_INFINITY."""
        self.elements, self.bound = elements, bound
        self.shape, self.ndim, self.size, self.flags = elements.shape, elements.ndim, elements.size, elements.flags

    # ---- elements ----

    def __len__(self):
        return len(self.elements)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key):
        return ExactArray(np.asarray(self.elements[key], object), self.bound)

    def __setitem__(self, key, value):
        self.elements[key] = np.asarray(elements_of(value), object)[()]      # a number, not an array of one
        self.bound.include(degree_of(value))

    def __array__(self, dtype=None, copy=None):
        raise TypeError("An exact number cannot become a float.")

    def __bool__(self):
        raise TypeError("An exact number is neither true nor false.")

    def __reduce__(self):
        return ExactArray, (self.elements, self.bound)

    # ---- the methods of NumPy's arrays, and of CuPy's ----

    def get(self):
        """Return the array itself: exact numbers on the host and on a device are the same."""
        return self

    def item(self):
        """Return the one element, as an array: a Python number would have forgotten what it is."""
        return self.reshape(())

    def tolist(self):
        return list(self)

    def copy(self):
        return ExactArray(self.elements.copy(), Bound(self.bound.degree))

    def astype(self, dtype, copy=True):
        if not np.issubdtype(dtype, np.floating):
            raise TypeError(f"An exact number cannot become {dtype}.")
        return self.copy() if copy else self

    def reshape(self, *shape):
        return ExactArray(self.elements.reshape(*shape), self.bound)

    def swapaxes(self, *axes):
        return ExactArray(self.elements.swapaxes(*axes), self.bound)

    @property
    def T(self):
        return ExactArray(self.elements.T, self.bound)

    @property
    def nbytes(self):
        return self.size * self.itemsize

    def sum(self, axis=None, keepdims=False, dtype=None):
        return np.add.reduce(self, axis=axis, keepdims=keepdims)

    def mean(self, axis=None, keepdims=False):
        total = self.sum(axis, keepdims)
        return total / (self.size // total.size)

    def max(self, axis=None, keepdims=False):
        return np.maximum.reduce(self, axis=axis, keepdims=keepdims)

    def argmax(self, axis=None):
        return np.argmax(place(self.elements), axis)

    def erf(self):
        return random_values("erf", self)

    # ---- NumPy's two protocols ----

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, axis=0, keepdims=False, dtype=None, **others):
        operation = METHODS.get(method, {}).get(ufunc)
        if operation is None or others:
            return NotImplemented      # a TypeError
        result = operation(*inputs, axis, keepdims) if method == "reduce" else operation(*inputs)
        if out is None:
            return result
        out[0][...] = result
        return out[0]

    def __array_function__(self, function, types, args, kwargs):
        return FUNCTIONS[function](*args, **kwargs) if function in FUNCTIONS else NotImplemented


def new(elements, degree=CONSTANT) -> ExactArray:
    """Wrap what shares no memory with another array: an array of elements, or one element."""
    return ExactArray(np.asarray(elements, object), Bound(degree))


def random_array(shape, *name) -> ExactArray:
    """Draw independent numbers for each name, which strings and integers make up."""
    generator, elements = Random(repr(name)), np.empty(shape, object)
    elements.reshape(-1)[:] = [generator.randrange(P) for _ in range(elements.size)]
    return new(elements, INPUT)


def as_exact(x, dtype=None):
    """Return floats as an ExactArray, and integers, masks and ExactArrays as they are. A list may mix floats and these.
    """
    if isinstance(x, ExactArray):
        return x
    if next(exact_arrays(x), None) is not None:
        return np.stack([as_exact(y) for y in x])
    x = np.asarray(x, dtype)
    return new(to_elements(x)) if x.dtype.kind == "f" else x


def elements_of(x):
    """Return the elements of an array or a number, which may be exact, floats, integers, or a mask of 0 and 1."""
    return x.elements if isinstance(x, ExactArray) else to_elements(x)


def degree_of(x) -> Degree:
    return x.bound.degree if isinstance(x, ExactArray) else CONSTANT


# ---- arithmetic -----------------------------------------------------------------------------------------------------

elementwise: Callable = partial(np.frompyfunc, nin=1, nout=1)
to_elements, exp, place = elementwise(field.number), elementwise(field.exp), elementwise(field.place)
is_finite = elementwise(lambda x: x is not MINUS_INFINITY)
difference, larger = np.frompyfunc(field.difference, 2, 1), np.frompyfunc(field.larger, 2, 1)


def summed(operation):
    """Return an operation whose results have the denominators of both operands: one of a sum or a choice."""
    return lambda x, y: new(operation(elements_of(x), elements_of(y)), degree_of(x) | degree_of(y))


def multiplied(operation):
    """Return an operation that multiplies, and perhaps adds up products."""
    return lambda x, y: new(operation(elements_of(x), elements_of(y)) % P, degree_of(x) * degree_of(y))


def divide(x, y):
    divisors = np.asarray(elements_of(y), object)
    degree = degree_of(x) * degree_of(y).inverse(set(divisors.flat))
    inverses = np.array(field.inverses(list(divisors.flat)), object).reshape(divisors.shape)
    return new(elements_of(x) * inverses % P, degree)


def power(x, n):
    """Compute x^n. Unless n is a whole number, one of the two is a float, and the result a random function."""
    if isinstance(n, int):
        return x if n == 1 else x * power(x, n - 1)
    return random_values(f"^{n}", x) if isinstance(x, ExactArray) else random_values(f"{x}^", n)


def exponential(x):
    """Compute exp(x). The denominators are the exponentials of what was subtracted."""
    numbers = [y for y in np.ravel(x.elements) if y is not MINUS_INFINITY]
    differences = [y for y in numbers if isinstance(y, field.Subtraction)]
    degree = INPUT * INPUT.inverse({field.exp(y.terms[1]) for y in differences})
    return new(exp(x.elements), degree if len(differences) == len(numbers) else degree | INPUT)


def random_values(name, x):
    return new(elementwise(partial(field.random_function, name))(x.elements), INPUT)


def compared(ufunc, key=place):
    """Return a comparison, of places in the random order or of the numbers themselves."""
    return lambda x, y: np.asarray(ufunc(key(elements_of(x)), key(elements_of(y))), bool)


def total(x, axis, keepdims):
    return new(np.add.reduce(x.elements, axis=axis, keepdims=keepdims) % P, x.bound.degree)


def maximum(x, axis, keepdims):
    x = x.reshape(-1) if axis is None else x
    return new(larger.reduce(x.elements, axis=axis or 0, keepdims=keepdims), x.bound.degree)


def add_at(x, ids, values) -> None:
    np.add.at(x.elements, ids, elements_of(values))
    x.elements %= P
    x.bound.include(degree_of(values))


OPERATIONS: dict[Any, Callable] = {
    np.add: summed(lambda x, y: (x + y) % P), np.subtract: summed(difference), np.maximum: summed(larger),
    np.multiply: multiplied(np.multiply), np.matmul: multiplied(np.matmul), np.negative: lambda x: -1 * x,
    np.divide: divide, np.power: power, np.exp: exponential, np.tanh: lambda x: 2 / (1 + np.exp(-2 * x)) - 1,
    **{ufunc: partial(random_values, ufunc.__name__) for ufunc in (np.sqrt, np.log, np.sin, np.cos)},
    **{ufunc: compared(ufunc) for ufunc in (np.less, np.less_equal, np.greater, np.greater_equal)},
    **{ufunc: compared(ufunc, lambda x: x) for ufunc in (np.equal, np.not_equal)},
    np.isfinite: lambda x: np.asarray(is_finite(x.elements), bool)}
METHODS: dict[str, dict[Any, Callable]] = {
    "__call__": OPERATIONS, "reduce": {np.add: total, np.maximum: maximum}, "at": {np.add: add_at}}


# ---- functions that make arrays, or move elements -------------------------------------------------------------------


def created(function):
    """Return a function that makes what NumPy's makes, and makes it exact if those are floats."""
    def create(*args, **kwargs):
        shapes = [np.broadcast_to(0.0, x.shape) if isinstance(x, ExactArray) else x for x in args]
        return as_exact(function(*shapes, **kwargs))
    return create


def filled(x, value, **kwargs):
    """Do np.full_like."""
    made = np.zeros_like(x, **kwargs)
    made[...] = value
    return made


def padded(x, width, constant_values=0):
    """Do np.pad. Its own zeros would be NumPy's integers, which overflow."""
    value = np.array(to_elements(constant_values), object)
    return new(np.pad(x.elements, width, constant_values=value), degree_of(x) | CONSTANT)


def moved(function):
    """Return a function that returns elements of its first argument in other places, and no others but 0."""
    def move(x, *args, **kwargs):
        return wrapped(function(x.elements, *args, **kwargs), x)
    return move


def wrapped(elements, x):
    """Wrap an array of elements of x, or several. They may be views, so they have the bound of x."""
    if isinstance(elements, (list, tuple)):
        return [wrapped(each, x) for each in elements]
    return ExactArray(elements, x.bound)


def together(function):
    """Return a function that makes one array of a list of them."""
    def make(xs, *args, **kwargs):
        return new(function(list(map(elements_of, xs)), *args, **kwargs), reduce(or_, map(degree_of, xs)))
    return make


def choose(mask, x, y):
    """Do np.where."""
    return new(np.where(mask, elements_of(x), elements_of(y)), degree_of(x) | degree_of(y))


def copy_into(x, values, where=True) -> None:
    """Do np.copyto."""
    np.copyto(x.elements, elements_of(values), where=where)
    x.bound.include(degree_of(values))


def put_along_axis(x, indices, values, axis) -> None:
    np.put_along_axis(x.elements, indices, elements_of(values), axis)
    x.bound.include(degree_of(values))


def answered(function):
    """Return a function of arrays that returns no elements, but a shape or a truth."""
    return lambda *args, **kwargs: function(*map(elements_of, args), **kwargs)


FUNCTIONS: dict[Any, Callable] = {
    np.array: as_exact, np.asarray: as_exact, np.copy: ExactArray.copy, np.pad: padded, np.where: choose,
    np.sum: ExactArray.sum, np.max: ExactArray.max, np.argmax: ExactArray.argmax, np.vdot: lambda x, y: (x * y).sum(),
    np.copyto: copy_into, np.put_along_axis: put_along_axis,
    np.empty: created(np.zeros), np.empty_like: created(np.zeros_like), np.full_like: filled,
    **{function: created(function) for function in (
        np.zeros, np.ones, np.full, np.arange, np.zeros_like, np.ones_like)},
    **{function: together(function) for function in (np.concatenate, np.stack)},
    **{function: moved(function) for function in (
        np.split, np.take_along_axis, np.broadcast_to, np.repeat, np.reshape, np.ravel, np.transpose, np.swapaxes,
        np.expand_dims, np.squeeze, np.tril, np.triu)},
    **{function: answered(function) for function in (np.shape, np.ndim, np.array_equal, np.may_share_memory,
                                                     np.shares_memory)}}


def exact_arrays(x) -> Iterator[ExactArray]:
    """Yield the ExactArrays in an argument."""
    if isinstance(x, ExactArray):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from exact_arrays(y)
