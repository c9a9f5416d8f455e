"""Arrays that have a shape, a dtype and a place in memory, but no data (PyTorch calls such tensors *meta*).

The program runs on them as it does on CuPy's: they are views of one another, live as long and take as many bytes, but
nothing is computed. A number that the host asks for is 0. The same functions are here as in the tests' spy: what is
missing raises TypeError.
"""
from collections.abc import Callable
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from shardlab.predict.meta_device import MetaDevice, Origin, line_of_caller

COPIES: set[Any] = {np.arange, np.array, np.asarray}               # what they make is small, or there already
MAKERS: set[Any] = COPIES | {np.empty, np.zeros, np.ones, np.full}


class Storage:
    """Memory that arrays share. It is given back when the last of them is gone."""

    __slots__ = ("device", "nbytes", "site")

    def __init__(self, device: MetaDevice, nbytes: int):
        self.device, self.nbytes, self.site = device, nbytes, Origin("", line_of_caller(), device.action)
        device.add(self.site, nbytes)

    def __del__(self):
        self.device.remove(self.site, self.nbytes)

    def name(self, kind: str) -> None:
        """Say what the memory is for."""
        self.device.remove(self.site, self.nbytes)
        self.site = self.site._replace(kind=kind)
        self.device.add(self.site, self.nbytes)


class MetaArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array without data. `frame` is a NumPy array of its shape, strides and dtype, which nobody reads."""

    __slots__ = ("frame", "known", "storage")
    __array_priority__ = 100
    data = SimpleNamespace(ptr=0)       # wherever it is, its address suits every kernel

    def __init__(self, frame: np.ndarray, storage: Storage, known: np.ndarray | None = None):
        """Describe a part of the storage. The elements may be `known`, if the host will ask for them."""
        self.frame, self.storage, self.known = frame, storage, known

    shape = property(lambda self: self.frame.shape)
    dtype = property(lambda self: self.frame.dtype)
    ndim = property(lambda self: self.frame.ndim)
    size = property(lambda self: self.frame.size)
    nbytes = property(lambda self: self.frame.nbytes)
    itemsize = property(lambda self: self.frame.itemsize)
    strides = property(lambda self: self.frame.strides)
    flags = property(lambda self: self.frame.flags)
    base = property(lambda self: self.storage)
    device = counter = property(lambda self: self.storage.device)
    T = property(lambda self: self.seen(self.frame.T))

    def seen(self, frame: np.ndarray) -> "MetaArray":
        """Return a view."""
        return MetaArray(frame, self.storage)

    def __len__(self):
        return len(self.frame)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key):
        if isinstance(key, (MetaArray, np.ndarray)):
            if key.dtype == bool:
                raise TypeError("How many elements a mask selects depends on data that an array without data lacks.")
            return made(self, (*key.shape, *self.shape[1:]), self.dtype, passes=2)
        keys = key if isinstance(key, tuple) else (key,)
        return self.seen(self.frame[keys if Ellipsis in keys else (*keys, ...)])

    def __setitem__(self, key, value):
        target = self if isinstance(key, (MetaArray, np.ndarray)) else self[key]
        if is_meta(value) and value.storage is not self.storage:    # else x[...] += y has assigned x to itself
            assert target is self or broadcast(value, target) == target.shape, f"{value.shape} into {target.shape}"
            self.device.stream(2 * value.nbytes)

    def __bool__(self):
        raise TypeError("An array without data is neither true nor false.")

    # ---- the methods of CuPy's arrays ----

    def get(self, out=None):
        """Return the numbers that are known, or zeros. An empty array says only where others shall be made."""
        if self.size == 0:
            return made(self, self.shape, self.dtype, device=self.device.host)
        return np.zeros(self.shape, self.dtype) if self.known is None else self.known

    def item(self):
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    def copy(self):
        return made(self, self.shape, self.dtype, passes=2)

    def astype(self, dtype, copy=True):
        return made(self, self.shape, dtype, self, passes=2) if copy or self.dtype != dtype else self

    def reshape(self, *shape):
        try:
            return self.seen(self.frame.reshape(*shape, copy=False))
        except ValueError:                  # for gaps, which CuPy closes by a copy, or a wrong shape
            x = self.copy() if not self.flags.c_contiguous else self
        return x.seen(x.frame.reshape(*shape, copy=False))

    def swapaxes(self, *axes):
        return self.seen(self.frame.swapaxes(*axes))

    def transpose(self, *axes):
        return self.seen(self.frame.transpose(*axes))

    def view(self, dtype):
        return self.seen(self.frame.view(dtype))

    def sum(self, axis=None, keepdims=False, dtype=None):
        return reduced(self, axis, keepdims, result_dtype(np.add, (self.dtype,), dtype, True))

    def max(self, axis=None, keepdims=False):
        return reduced(self, axis, keepdims, self.dtype)

    min = mean = max        # of the same shape and format

    def argmax(self, axis=None):
        return reduced(self, axis, False, np.int64)

    # ---- NumPy's two protocols ----

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, axis=0, keepdims=False, dtype=None):
        if method == "reduce":
            return reduced(self, axis, keepdims, result_dtype(ufunc, (self.dtype,), dtype, True))
        if method == "at":
            return self.device.stream(3 * inputs[-1].nbytes)
        if method != "__call__" or ufunc.nout > 1:
            return NotImplemented
        product = ufunc is np.matmul
        shape, passes = product_shape(*inputs) if product else broadcast(*inputs), 1 + len(inputs) * (not product)
        if out is not None:
            assert out[0].shape == shape, f"a result of shape {shape} does not fit into {out[0].shape}"
            self.device.stream(passes * out[0].nbytes)
            return out[0]
        like = next((x for x in inputs if is_meta(x) and x.shape == shape), None)
        return made(self, shape, result_dtype(ufunc, tuple(map(kind_of, inputs)), dtype), like, passes=passes)

    def __array_function__(self, function, types, args, kwargs):
        if function in MAKERS:
            first, *others = args
            found = first if is_meta(first) else function(*args, **kwargs) if function in COPIES else (
                np.broadcast_to(function((), *others, **kwargs), first))
            return made(self, found.shape, found.dtype, passes=1)
        return FUNCTIONS[function](*args, **kwargs) if function in FUNCTIONS else NotImplemented


def prototype(device: MetaDevice) -> MetaArray:
    """Return an empty array on a device, to make others like it."""
    return MetaArray(np.empty(0), Storage(device, 0))


def is_meta(x) -> bool:
    """Report whether x is an array without data: a kernel has nothing to do."""
    return isinstance(x, MetaArray)


# ---- new arrays -----------------------------------------------------------------------------------------------------


def made(x: MetaArray, shape, dtype, like=None, device: MetaDevice | None = None, passes: float = 0) -> MetaArray:
    """Make an array on the device of x, laid out like another one, in this many passes through memory."""
    device, shape = device or x.device, (shape,) if isinstance(shape, int) else tuple(shape)
    gaps = like is not None and len(shape) == like.ndim and not like.flags.c_contiguous
    frame = frame_of(shape, np.dtype(dtype), like.strides if gaps else None)
    if passes:
        device.stream(passes * frame.nbytes)
    return MetaArray(frame, Storage(device, frame.nbytes))


@cache
def frame_of(shape: tuple[int, ...], dtype: np.dtype, along: tuple[int, ...] | None) -> np.ndarray:
    """Return a frame. Its axes lie in the order of those with the steps `along`; None: in C's order."""
    axes = sorted(range(len(shape)), key=lambda axis: -along[axis] if along else axis)
    steps, step = [0] * len(shape), dtype.itemsize
    for axis in reversed(axes):
        steps[axis], step = step, step * shape[axis]
    return as_strided(np.zeros(1, dtype), shape, steps)


def like_of(function) -> Callable:
    """Return np.empty_like, or one of its siblings, for arrays without data."""
    def make(x, *fill, dtype=None, order="K", shape=None):
        return made(x, x.shape if shape is None else shape, dtype or x.dtype, x if order == "K" else None,
                    passes=function is not np.empty_like)
    return make


# ---- shapes and dtypes of results -----------------------------------------------------------------------------------


def kind_of(x):
    """Return what decides the dtype of a result: the dtype of an array, the type of a number of Python's."""
    return getattr(x, "dtype", None) or type(x)


@cache
def result_dtype(ufunc, kinds: tuple, dtype=None, reduces: bool = False) -> np.dtype:
    """Ask NumPy for the dtype of a result."""
    ones = [kind(1) if isinstance(kind, type) else np.ones((1, 1), kind) for kind in kinds]
    return (ufunc.reduce(*ones, dtype=dtype) if reduces else ufunc(*ones, dtype=dtype)).dtype


def broadcast(*xs) -> tuple[int, ...]:
    """Return the shape to which arrays and numbers are stretched. Raises ValueError."""
    return stretched(*[getattr(x, "shape", ()) for x in xs])


stretched = cache(np.broadcast_shapes)


def product_shape(x, y) -> tuple[int, ...]:
    """Return the shape of x @ y. Raises ValueError."""
    (rows, inner), (its_inner, columns) = (x.shape[-2:] if x.ndim > 1 else (1, x.size)), (
        y.shape[-2:] if y.ndim > 1 else (y.size, 1))
    if inner != its_inner:
        raise ValueError(f"{x.shape} @ {y.shape}: {inner} columns are not {its_inner} rows")
    batch = stretched(x.shape[:-2], y.shape[:-2])
    x.device.multiply(rows, inner, columns, prod(batch))
    return (*batch, *[rows] * (x.ndim > 1), *[columns] * (y.ndim > 1))


def reduced(x, axis, keepdims, dtype):
    """Make the result of a reduction."""
    axes = range(x.ndim) if axis is None else [one % x.ndim for one in ([axis] if isinstance(axis, int) else axis)]
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes]
    x.device.stream(x.nbytes)
    return made(x, shape, dtype)


# ---- functions ------------------------------------------------------------------------------------------------------


def seen(function) -> Callable:
    """Return a function that returns views of its first argument."""
    def view(x, *args, **kwargs):
        found = function(x.frame, *args, **kwargs)
        return [x.seen(one) for one in found] if isinstance(found, list) else x.seen(found)
    return view


def concatenate(xs, axis=0):
    shape = list(xs[0].shape)
    shape[axis] = sum(x.shape[axis] for x in xs)
    return made(xs[0], shape, np.result_type(*(x.dtype for x in xs)), passes=2)


def stack(xs, axis=0):
    shape = list(xs[0].shape)
    shape.insert(axis % (len(shape) + 1), len(xs))
    return made(next(filter(is_meta, xs)), shape, np.result_type(*(x.dtype for x in xs)), passes=2)


def where(mask, x, y):
    like = next(filter(is_meta, (mask, x, y)))
    return made(like, broadcast(mask, x, y), result_dtype(np.add, (kind_of(x), kind_of(y))), passes=4)


def searchsorted(x, ids):
    """Return where each of the ids 0 to n would begin in sorted ids below n that nobody knows, as if each were there as
    often as any other.
    """
    found, (each, more) = made(ids, ids.shape, np.int64), divmod(x.size, ids.size - 1)
    found.known = each * np.arange(ids.size) + np.minimum(np.arange(ids.size), more)
    return found


def diff(x):
    found = made(x, len(x) - 1, x.dtype)
    found.known = np.diff(x.get())
    return found


def may_share(x, y) -> bool:
    return is_meta(x) and is_meta(y) and x.storage is y.storage


FUNCTIONS: dict[Any, Callable] = {
    **{function: like_of(function) for function in (np.empty_like, np.zeros_like, np.ones_like, np.full_like)},
    **{function: seen(function) for function in (np.split, np.broadcast_to, np.expand_dims, np.squeeze, np.moveaxis,
                                                 np.diagonal)},
    **{function: getattr(MetaArray, function.__name__) for function in (
        np.sum, np.max, np.mean, np.argmax, np.copy, np.reshape, np.swapaxes, np.transpose)},
    np.concatenate: concatenate, np.stack: stack, np.where: where, np.diff: diff,
    np.searchsorted: searchsorted, np.shares_memory: may_share, np.may_share_memory: may_share,
    np.shape: lambda x: x.shape, np.ndim: lambda x: x.ndim,
    np.take_along_axis: lambda x, ids, axis: made(x, ids.shape, x.dtype, passes=2),
    np.put_along_axis: lambda x, ids, values, axis: None, np.copyto: lambda x, values, where=True: None,
    np.tril: lambda x, k=0: x.copy(), np.vdot: lambda x, y: reduced(x, None, False, x.dtype),
    np.argsort: lambda x, axis=-1, kind=None: made(x, x.shape, np.int64, passes=8)}
