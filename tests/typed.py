"""Arrays that carry a type (reference/named/types.py) through the machine's own layers, and no numbers: what a checker
of types sees of code that is written by hand.

One rank of RANKS runs a layer, forward and backward. An array is a shape, and one of the kinds below. Whether it is cut
is told by its shape: a size that is a whole axis's has RANKS as a factor for every axis in it, a rank's piece lacks it.
So views, transposes and reshapes need no rules. Invariant and replicated arrays look alike in code whose backward is
written out; what tells them apart is the type of the gradient, which is compared at the end (`tests/typed_layers.py`).
"""
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

RANKS = 17
HEADS, WIDTH, VOCABULARY, POSITIONS = AXES = 23, 29, 31, 37      # a rank's elements of an axis: all prime

FRESH = "fresh"             # zeros, or not yet written: of any type
EQUAL = "equal"             # on all ranks; or, if the shape is cut, a rank's piece
PARTIAL = "partial"         # a term of a sum over the ranks
LARGEST = "largest"         # of a rank's piece: the maximum over the ranks is meant
LOOKED_UP = "looked up"     # where a rank holds what was asked for; nonsense elsewhere


class TypeFault(Exception):
    """An operation on arrays whose types do not go together."""


def factors(n: int, p: int) -> int:
    found = 0
    while n and n % p == 0:
        n, found = n // p, found + 1
    return found


def is_cut(n: int) -> bool:
    """Report whether so many elements are a rank's piece of an axis."""
    return factors(n, RANKS) < sum(factors(n, p) for p in AXES)


class Cell:
    """The kind of all arrays that share memory, and whether all of it is a rank's piece."""

    def __init__(self, kind: str, shape):
        self.kind, self.cut = kind, any(map(is_cut, shape))


class TypedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array without numbers, but with a type."""

    def __init__(self, shape, dtype=np.float64, kind: str = EQUAL, cell: Cell | None = None):
        self.shape, self.dtype = tuple(map(int, shape)), np.dtype(dtype)
        self.ndim, self.size, self.itemsize = len(self.shape), prod(self.shape), self.dtype.itemsize
        self.cell = cell or Cell(kind, self.shape)
        self.nbytes = self.size * self.itemsize

    @property
    def kind(self) -> str:
        return self.cell.kind

    @property
    def cut(self) -> bool:
        return any(map(is_cut, self.shape))

    def __str__(self):
        return f"an array {list(self.shape)}, {'a piece of one axis' if self.cut and self.kind == EQUAL else self.kind}"

    def view(self, shape) -> "TypedArray":
        return TypedArray(shape, self.dtype, cell=self.cell)

    def frame(self):
        return as_strided(np.zeros(1, self.dtype), self.shape, np.cumprod([self.itemsize, *self.shape[:0:-1]])[::-1])

    T = property(lambda self: self.view(self.shape[::-1]))

    def __len__(self):
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __bool__(self):
        raise TypeError("A type is neither true nor false.")

    def __getitem__(self, key):
        if isinstance(key, TypedArray):                      # ids, one for each row
            return TypedArray((*key.shape, *self.shape[1:]), self.dtype, looked_up(self, 0))
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(one, TypedArray) for one in keys):
            shapes = [np.broadcast_to(0, one.shape) if isinstance(one, TypedArray) else one for one in keys]
            return TypedArray(self.frame()[tuple(shapes)].shape, self.dtype, self.kind)
        return self.view(self.frame()[key].shape)

    def __setitem__(self, key, value):
        if not isinstance(value, TypedArray):
            return
        if value.cell is not self.cell:
            (self if isinstance(key, TypedArray) else self[key]).write(value.kind)

    def write(self, kind: str) -> None:
        """Note that an array of this kind, and of this shape, was written here."""
        if kind == EQUAL and self.cut and not self.cell.cut:
            kind = PARTIAL                                   # a piece in a whole array of zeros
        self.cell.kind = kind

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        known = prod(n for n in shape if n != -1)
        return self.view([self.size // known if n == -1 else n for n in shape])

    def swapaxes(self, *axes):
        return self.view(self.frame().swapaxes(*axes).shape)

    def transpose(self, *axes):
        return self.view(self.frame().transpose(*axes).shape)

    def copy(self):
        return TypedArray(self.shape, self.dtype, self.kind)

    def astype(self, dtype, copy=True):
        return TypedArray(self.shape, dtype, self.kind)

    def sum(self, axis=None, keepdims=False, dtype=None):
        return reduced(self, axis, keepdims, PARTIAL)

    def max(self, axis=None, keepdims=False):
        require(self.kind not in (PARTIAL, LOOKED_UP), "the maximum", self)
        return reduced(self, axis, keepdims, LARGEST)

    def mean(self, axis=None, keepdims=False):
        return reduced(self, axis, keepdims, None)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, axis=0, keepdims=False, dtype=None, where=True):
        if method == "reduce":
            return self.sum(axis, keepdims) if ufunc is np.add else self.max(axis, keepdims)
        if method == "at":
            return added_at(*inputs)
        shape = product_shape(*inputs) if ufunc is np.matmul else np.broadcast_shapes(*[np.shape(x) for x in inputs])
        kind = RULES.get(ufunc, function)(ufunc.__name__, *inputs)
        if out is not None:
            out[0].write(kind)
            return out[0]
        compares = ufunc in (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal, np.isfinite)
        dtypes = [getattr(x, "dtype", type(x)) for x in inputs]
        return TypedArray(shape, dtype or (bool if compares else np.result_type(*dtypes)), kind)

    def __array_function__(self, function, types, args, kwargs):
        return FUNCTIONS[function](*args, **kwargs) if function in FUNCTIONS else NotImplemented


# ---- rules ----------------------------------------------------------------------------------------------------------


def require(holds: bool, what: str, *arrays, why: str = "is not that of the whole sum") -> None:
    """Raise TypeFault unless an operation goes together with the arrays' types."""
    if not holds:
        raise TypeFault(f"{what} of {' and '.join(map(str, arrays))} {why}.")


def kinds_of(*xs) -> list[str]:
    """Return the kinds of operands. What every rank has from its source is equal; zeros are of any kind."""
    return [x.kind if isinstance(x, TypedArray) else FRESH if np.ndim(x) == 0 and x == 0 else EQUAL for x in xs]


def added(name, *xs) -> str:
    """Give the kind of a sum: of one kind alone. What was looked up may be shifted, since nonsense stays nonsense."""
    kinds = set(kinds_of(*xs)) - {FRESH}
    if LOOKED_UP in kinds and PARTIAL not in kinds:
        return LOOKED_UP
    require(len(kinds) < 2, f"the {name}", *xs, why="adds what all have to a term of a sum: it counts once a rank")
    return kinds.pop() if kinds else FRESH


def multiplied(name, x, y) -> str:
    """Give the kind of a product: linear in each factor. A mask makes what was looked up a term of a sum."""
    kinds = kinds_of(x, y)
    if FRESH in kinds:
        return FRESH
    if LOOKED_UP in kinds:
        other = (x, y)[1 - kinds.index(LOOKED_UP)]
        return PARTIAL if getattr(other, "dtype", None) == np.bool_ else LOOKED_UP
    if PARTIAL in kinds:
        other = kinds[1 - kinds.index(PARTIAL)]
        whole = not getattr((x, y)[1 - kinds.index(PARTIAL)], "cut", False)
        require(other == EQUAL and whole and not (name == "divide" and kinds[1] == PARTIAL), f"the {name}", x, y)
        return PARTIAL
    return function(name, x, y)


def function(name, *xs) -> str:
    """Give the kind of what is not linear."""
    kinds = set(kinds_of(*xs)) - {FRESH}
    if LOOKED_UP in kinds and PARTIAL not in kinds:
        return LOOKED_UP
    require(not kinds & {PARTIAL, LARGEST}, f"the {name}", *xs)
    return EQUAL if kinds else FRESH


def product_of_matrices(name, x, y) -> str:
    """Give the kind of a matrix product: partial if what is summed over is cut."""
    kind, shape = multiplied(name, x, y), product_shape(x, y)
    if is_cut(x.shape[-1]):
        require(kind != PARTIAL, "the product", x, y)
        kind = PARTIAL
    require(sum(map(is_cut, shape)) + (kind == PARTIAL) < 2, "the product", x, y,
           why="has pieces of two axes, of which a rank has only those with one number")
    return kind


def product_shape(x, y):
    require(x.shape[-1] == y.shape[-2], "the product", x, y, why="does not fit: one is cut, the other is not")
    return *np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]


def reduced(x, axis, keepdims, over_cut):
    """Reduce. Over an axis that is cut a sum is partial, a maximum that of a piece, and a mean none."""
    axes = range(x.ndim) if axis is None else {one % x.ndim for one in np.atleast_1d(axis)}
    kind = x.kind
    if any(is_cut(x.shape[i]) for i in axes):
        require(over_cut is not None and kind in (EQUAL, FRESH), "the reduction", x)
        kind = over_cut
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes]
    return TypedArray(shape, x.dtype, kind)


def looked_up(table, axis: int) -> str:
    require(table.kind != PARTIAL or not is_cut(table.shape[axis]), "the lookup", table)
    return LOOKED_UP if is_cut(table.shape[axis]) else table.kind


def added_at(target, ids, values):
    """Add values to the rows of their ids. Of a whole table a rank gets only what its own values add."""
    kind = values.kind
    if values.cut and not target.cut:
        require(kind == EQUAL, "the sum by rows", values)
        kind = PARTIAL
    target.write(added("sum by rows", target, TypedArray((), kind=kind)))


RULES: dict[Any, Any] = {
    np.add: added, np.subtract: added, np.negative: added, np.positive: added,
    np.multiply: multiplied, np.divide: multiplied, np.matmul: product_of_matrices}


# ---- functions ------------------------------------------------------------------------------------------------------


def chosen(mask, x, y):
    """Do np.where. A mask over what was looked up, with zero elsewhere, makes it a term of a sum."""
    kinds = kinds_of(x, y)
    kind = PARTIAL if sorted(kinds) == sorted([LOOKED_UP, FRESH]) else added("choice", x, y)
    dtype = np.result_type(*[getattr(one, "dtype", type(one)) for one in (x, y)])
    return TypedArray(np.broadcast_shapes(*map(np.shape, (mask, x, y))), dtype, kind)


def new(kind):
    def make(x, *fill, dtype=None, order="K", shape=None):
        return TypedArray(x.shape if shape is None else np.atleast_1d(shape), dtype or x.dtype, kind)
    return make


def like(function, kind=EQUAL):
    """Return a function that makes what NumPy makes, as an array without numbers."""
    def make(*args, like=None, **kwargs):
        found = function(*[0 if isinstance(x, TypedArray) and not x.ndim else x for x in args], **kwargs)
        return TypedArray(found.shape, found.dtype, kind)
    return make


def joined(function):
    def make(xs, *args, **kwargs):
        found = function([np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in xs], *args, **kwargs)
        return TypedArray(found.shape, found.dtype, added("joining", *xs))
    return make


def seen(function):
    def view(x, *args, **kwargs):
        found = function(np.broadcast_to(np.zeros((), x.dtype), x.shape), *args, **kwargs)
        return [x.view(one.shape) for one in found] if isinstance(found, list) else x.view(found.shape)
    return view


def put(x, ids, values, axis) -> None:
    """Do np.put_along_axis: where a rank holds the element, only there are the values meant."""


FUNCTIONS: dict[Any, Any] = {
    np.empty_like: new(FRESH), np.zeros_like: new(FRESH), np.ones_like: new(EQUAL), np.full_like: new(EQUAL),
    np.where: chosen, np.concatenate: joined(np.concatenate), np.stack: joined(np.stack),
    np.arange: like(np.arange), np.zeros: like(np.zeros, FRESH), np.array: like(np.array), np.put_along_axis: put,
    np.take_along_axis: lambda x, ids, axis: TypedArray(ids.shape, x.dtype, looked_up(x, axis)),
    np.argsort: lambda x, axis=-1, kind=None: TypedArray(x.shape, np.int64), np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim, np.may_share_memory: lambda x, y: getattr(x, "cell", 0) is getattr(y, "cell", 1),
    **{function: seen(function) for function in (np.split, np.broadcast_to, np.expand_dims, np.squeeze, np.tril,
                                                 np.swapaxes, np.transpose)},
    **{function: getattr(TypedArray, function.__name__) for function in (np.sum, np.max, np.mean, np.copy, np.reshape)}}


# ---- collectives ----------------------------------------------------------------------------------------------------


class TypedGroup:
    """One of RANKS tensor-parallel ranks, whose collectives change types."""

    name, size, rank = "tensor", RANKS, 1

    def all_reduce(self, x, reason, op="sum"):
        wanted = LARGEST if op == "max" else PARTIAL
        require(x.kind in (wanted, FRESH), f"the all-reduce ({op}) for {reason}", x, why=f"needs what is {wanted}")
        x.cell.kind = EQUAL
        return x

    def all_gather(self, x, axis, reason):
        require(x.kind in (EQUAL, FRESH) and is_cut(x.shape[axis]), f"the all-gather for {reason}", x,
               why="needs pieces of that axis")
        return TypedArray([n * (RANKS if i == axis % x.ndim else 1) for i, n in enumerate(x.shape)], x.dtype)

    def reduce_scatter(self, x, axis, reason):
        require(x.kind in (PARTIAL, FRESH), f"the reduce-scatter for {reason}", x, why="needs what is partial")
        return TypedArray([n // (RANKS if i == axis % x.ndim else 1) for i, n in enumerate(x.shape)], x.dtype)

    def broadcast(self, x, reason, root=0):
        return TypedArray(x.shape, x.dtype)
