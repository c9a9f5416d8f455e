"""A spy: an array that behaves like CuPy's on a machine without a GPU, and refuses what would go wrong there.

Its elements lie in a NumPy array that nothing but `get` and `set` can reach. A layer that runs on spies makes no
hidden copy to the host, mixes in no host array, and calls nothing that CuPy lacks or calls differently.

Where CuPy would work, but slowly and without a word, the spy is the stricter: `bool(x)`, `float(x)` and `int(x)`,
iteration over elements, reading through a mask or a list, and matrix products of more than two dimensions are
refused, each with a sentence that says what CuPy would do. `x.item()` and `x.get()` say that they wait for the
device, so they are allowed.
"""
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

SCALARS = (bool, int, float, complex, np.generic)


def signatures(table: str) -> dict[str, list[str]]:
    """Read lines "functions: parameters"."""
    found = {}
    for names, parameters in (line.split(":") for line in table.strip().splitlines()):
        found |= dict.fromkeys(names.split(), parameters.split())
    return found


# What CuPy 14 has, with the parameters that it takes there, in order; a star takes any number.
FUNCTIONS = signatures("""
    sum prod mean argmax argmin: a axis dtype out keepdims
    max min amax amin all any: a axis out keepdims
    var std: a axis dtype out ddof keepdims
    count_nonzero expand_dims squeeze flip sort: a axis
    cumsum cumprod: a axis dtype out
    linalg.norm: x ord axis keepdims
    dot outer: a b out
    vdot inner: a b
    tensordot: a b axes
    einsum: *operands optimize
    reshape: a newshape order
    ravel copy: a order
    transpose: a axes
    swapaxes: a axis1 axis2
    moveaxis: a source destination
    broadcast_to: array shape
    broadcast_arrays: *args
    shape ndim size: a
    concatenate stack: tup axis out dtype casting
    vstack hstack: tup dtype casting
    split array_split: ary indices_or_sections axis
    roll: a shift axis
    repeat: a repeats axis
    tile: A reps
    pad: array pad_width mode constant_values
    where: condition x y
    take: a indices axis out
    take_along_axis: a indices axis
    put_along_axis: arr indices values axis
    tril triu: m k
    diagonal: a offset axis1 axis2
    clip: a a_min a_max out
    argsort: a axis kind
    searchsorted: a v side sorter
    diff: a n axis
    round: a decimals out
    nan_to_num: x copy nan posinf neginf
    isclose: a b rtol atol equal_nan
    copyto: dst src casting where
    result_type: *arrays_and_dtypes
    can_cast: from_ to casting
    may_share_memory: a b max_work
    empty_like: prototype dtype order subok shape
    zeros_like ones_like: a dtype order subok shape
    full_like: a fill_value dtype order subok shape
""")

# Creation with like=x: on the device, and for the first two a transfer that can be seen.
CREATION = signatures("""
    array: obj dtype copy order
    asarray: a dtype order
    zeros ones empty: shape dtype order
    full: shape fill_value dtype order
    arange: start stop step dtype
    eye: N M k dtype order
    identity: n dtype
    tri: N M k dtype
""")

METHODS = signatures("""
    sum prod mean: axis dtype out keepdims
    max min all any: axis out keepdims
    var std: axis dtype out ddof keepdims
    argmax argmin: axis out dtype keepdims
    cumsum: axis dtype out
    dot: b out
    reshape: *shape order
    ravel flatten copy: order
    transpose: *axes
    swapaxes: axis1 axis2
    squeeze argsort: axis
    take: indices axis out
    repeat: repeats axis
    diagonal: offset axis1 axis2
    clip: min max out
    round: decimals out
    astype: dtype order casting subok copy
    view: dtype
    fill: value
""")

ATTRIBUTES = {"shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags", "T", "mT", "real", "imag"}
UFUNCS_LACKING = {"isnat", "spacing", "matvec", "vecdot", "vecmat"}
UFUNC_METHODS = {"__call__": None, "at": {"add", "subtract", "maximum", "minimum"}, "reduce": {"add", "multiply"}}


class Refused(TypeError):
    """Something that goes wrong on a device, or works there by a hidden copy."""


@dataclasses.dataclass
class Queue:
    """The numbers of computations that the device was given on its current stream, and that the host has waited for."""

    launched: int = 0
    finished: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)     # where nobody could raise them
    pinned: weakref.WeakSet = dataclasses.field(default_factory=weakref.WeakSet)
    lock: Any = dataclasses.field(default_factory=threading.Lock)   # a checkpoint is saved by several threads
    recorded: list[Callable[[], Any]] | None = None                 # while a graph is recorded: what computes it again

    def launch(self, again: Callable[[], Any]) -> None:
        """Count a computation, which `again` repeats."""
        self.launched += 1
        if self.recorded is not None:
            self.recorded.append(again)

    def refuse_transfer(self) -> None:
        if self.recorded is not None:
            raise Refused("Nothing moves to or from the host while a graph is recorded.")

    def finish(self, until: int | None = None) -> None:
        """Wait for everything that was launched, or for so much of it."""
        self.refuse_transfer()
        with self.lock:
            self.finished = max(self.finished, self.launched if until is None else until)
            for memory in list(self.pinned):
                memory.settle()


QUEUE = Queue()
NONSENSE = 0xFF     # in every byte: of floats, not a number


class Pinned(bytearray):
    """Host memory that the device reads (`x.set`) or writes (an `x.get` that does not block), later. CuPy uses it again
    when nobody holds it any more.
    """

    __hash__ = object.__hash__

    def __init__(self, nbytes: int):
        super().__init__(nbytes)
        self.copies: list[tuple[int, slice, bytes, bool]] = []
        with QUEUE.lock:
            QUEUE.pinned.add(self)

    def begin(self, host: np.ndarray, elements: np.ndarray, written: bool) -> None:
        """Begin a copy from or to these elements. What is written is nonsense until it is over."""
        start = host.__array_interface__["data"][0] - np.frombuffer(self, np.uint8).__array_interface__["data"][0]
        QUEUE.refuse_transfer()
        with QUEUE.lock:
            QUEUE.launched += 1
            self.copies.append((QUEUE.launched, slice(start, start + host.nbytes), elements.tobytes(), written))
            if written:
                host.reshape(-1).view(np.uint8)[...] = NONSENSE

    def settle(self) -> None:
        """End the copies that the host has waited for."""
        for number, place, content, written in self.copies:
            if number <= QUEUE.finished and written:
                self[place] = content
            elif number <= QUEUE.finished and self[place] != content:
                QUEUE.faults.append("pinned memory was changed before the device had read it")
        self.copies = [copy for copy in self.copies if copy[0] > QUEUE.finished]

    def __del__(self):
        if self.copies:
            QUEUE.faults.append("pinned memory was let go of before the device had finished with it")


class Memory:
    """A place in the device's memory. In LENT is, for each `ptr` that was asked for, whose it is; several arrays may
    begin there.
    """

    def __init__(self, elements: np.ndarray):
        self.ptr = elements.__array_interface__["data"][0]
        if QUEUE.recorded is not None:
            QUEUE.recorded.append(partial(id, elements))        # the graph's memory stays
        alive = [lent for lent in LENT.get(self.ptr, []) if lent.owner() is not None]
        LENT[self.ptr] = [*alive, Lent(weakref.ref(owner(elements)), elements.nbytes, elements.dtype)]


class Lent(NamedTuple):
    """An array whose address was given away, but for the array itself: to use it is to know that it is still there."""

    owner: weakref.ref
    nbytes: int
    dtype: np.dtype


LENT: dict[int, list[Lent]] = {}


def owner(elements: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a view."""
    while isinstance(elements.base, np.ndarray):
        elements = elements.base
    return elements


class SpyArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that is, to those who use it, on a device. `SpyArray(host)` copies a host array there."""

    __array_priority__ = 100

    def __init__(self, host):
        self._elements = np.array(host)

    # --- explicit transfers

    def get(self, *, out=None, blocking=True) -> np.ndarray:
        """Copy to the host, into `out` if it is given; without `blocking` later, into pinned memory."""
        if blocking:
            QUEUE.finish()
        if out is None:
            return self._elements.copy()
        if not isinstance(out, np.ndarray) or not out.flags.c_contiguous:
            raise Refused("CuPy's x.get writes to a contiguous host array.")
        if out.dtype != self.dtype or out.shape != self.shape:
            raise Refused(f"CuPy's x.get converts nothing: {self.dtype} {self.shape} into {out.dtype} {out.shape}.")
        if blocking:
            out[...] = self._elements
        elif isinstance(pinned := owner(out).base, Pinned):
            pinned.begin(out, self._elements, written=True)
        else:
            raise Refused("CuPy's x.get waits for the device if `out` is not in pinned memory.")
        return out

    def set(self, host) -> None:
        """Copy a host array of the same shape and dtype into this array, which must be contiguous."""
        if not isinstance(host, np.ndarray):
            raise Refused(f"CuPy's x.set takes a host array, not {kind(host)}.")
        if host.dtype != self.dtype or host.shape != self.shape:
            raise Refused(f"CuPy's x.set converts nothing: {host.dtype} {host.shape} into {self.dtype} {self.shape}.")
        if not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise Refused("CuPy cannot set a view that is not contiguous.")
        if isinstance(pinned := owner(host).base, Pinned):
            pinned.begin(host, host, written=False)
        else:
            QUEUE.refuse_transfer()
            QUEUE.launched += 1
        self._elements[...] = host

    def item(self):
        """Return the one element as a Python number. Wait for the device, and say so."""
        QUEUE.finish()
        return self._elements.item()

    @property
    def device(self):
        """Return the device, which a thread has to enter before it uses streams and events."""
        return contextlib.nullcontext()

    # --- what others than CuPy get to see

    @property
    def data(self) -> "Memory":
        """Return the memory of the elements."""
        return Memory(self._elements)

    @property
    def __cuda_array_interface__(self) -> dict:
        """Describe the memory for a CUDA-aware MPI, which reads it immediately, whatever the device has yet to do."""
        if QUEUE.launched > QUEUE.finished:
            raise Refused("A CUDA-aware MPI takes what lies in memory, before the device has put it there: synchronise "
                          "first.")
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.data.ptr, False), "version": 3,
                "strides": None if self.flags.c_contiguous else self.strides}

    # --- hidden transfers

    def __array__(self, dtype=None, copy=None):
        raise Refused("CuPy refuses to become a NumPy array unasked: write x.get(), or np.asarray(..., like=x) "
                      "for an array on the device.")

    def __bool__(self):
        raise Refused("CuPy would wait for the device and copy one element to the host: write x.item(), or np.where.")

    def __float__(self):
        raise Refused("CuPy's float(x) would wait for the device without a word: write x.item().")

    def __int__(self):
        raise Refused("CuPy's int(x) would wait for the device without a word: write x.item().")

    def __index__(self):
        raise Refused("CuPy's arrays cannot serve as a Python index: write x.item().")

    def __iter__(self):
        if self.ndim < 2:
            raise Refused("Iterating over elements would make an array on the device for each: work on all at once.")
        return (self[i] for i in range(len(self)))

    # --- elements

    def __len__(self):
        return len(self._elements)

    def __getitem__(self, key):
        check_key(key)
        if any(isinstance(k, SpyArray) and k.dtype == bool for k in as_tuple(key)):
            raise Refused("Reading through a mask has a shape that depends on the data, so CuPy would wait for the "
                          "device to count: use np.where.")
        compute = partial(self._elements.__getitem__, to_plain(with_ellipsis(key)))
        result = compute()
        spy = to_spy(result)
        if computed(result, [self._elements]):
            QUEUE.launch(partial(compute_into, spy, compute))
        return spy

    def __setitem__(self, key, value):
        check_key(key)
        if not isinstance(value, (SpyArray, *SCALARS)):
            raise Refused(f"CuPy refuses to assign {kind(value)} to elements on the device.")
        assign = partial(self._elements.__setitem__, to_plain(with_ellipsis(key)), to_plain(value))
        assign()
        QUEUE.launch(assign)

    def __getattr__(self, name):
        if name in ATTRIBUTES:
            return to_spy(getattr(self._elements, name))
        if name in METHODS:
            return lambda *args, **kwargs: run(
                f"x.{name}", getattr(self._elements, name), METHODS[name], args, kwargs)
        raise AttributeError(f"The spy array has no `{name}`. If CuPy's arrays have it, add it to {__name__}.py.")

    def __repr__(self):
        return f"SpyArray(shape={self.shape}, dtype={self.dtype})"

    # --- NumPy's two dispatch protocols

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        name = ufunc.__name__
        known = UFUNC_METHODS.get(method, set())
        if name in UFUNCS_LACKING or (known is not None and name not in known):
            raise Refused(f"CuPy has no np.{name}{'' if method == '__call__' else '.' + method}.")
        if name == "matmul" and any(np.ndim(x) > 2 for x in inputs):
            raise Refused(f"np.matmul of shapes {' and '.join(str(np.shape(x)) for x in inputs)}: beyond 2-D, CuPy "
                          "copies transposed inputs, computes float16 in float32 and fails on bfloat16. Reshape to "
                          "2-D, or use a batched kernel.")
        for x in inputs if method == "__call__" else ():
            if not isinstance(x, (SpyArray, np.ndarray, *SCALARS)):
                raise Refused(f"CuPy's {name} takes arrays and numbers, not {kind(x)}.")
        return run(f"np.{name}", getattr(ufunc, method), ["*inputs", "out", "dtype", "casting", "axis", "keepdims"],
                   inputs, kwargs)

    def __array_function__(self, function, types, args, kwargs):
        name = f"{function.__module__}.{function.__name__}".removeprefix("numpy.")
        if name in CREATION:
            if any(isinstance(x, np.ndarray) for x in leaves(args)):
                QUEUE.refuse_transfer()
            return run(f"np.{name}", function, CREATION[name], replaced(args, np.ndarray, SpyArray), kwargs)
        if name.endswith("_like") and kwargs.get("shape") == ():
            raise Refused(f"CuPy's {name} takes the shape () for none, and gives that of the prototype.")
        if name not in FUNCTIONS:
            raise Refused(f"CuPy has no np.{name}, or calls it otherwise, or waits for the device in it. "
                          f"If it is none of these, add it to {__name__}.py.")
        return run(f"np.{name}", function, FUNCTIONS[name], args, kwargs)


def run(name, function, parameters, args, kwargs):
    """Call a NumPy function on the elements behind the spies, if CuPy takes these arguments."""
    if not parameters[0].startswith("*") and len(args) > len(parameters):
        raise Refused(f"CuPy's {name} takes at most {len(parameters)} positional arguments: {', '.join(parameters)}.")
    for keyword in kwargs.keys() - set(parameters):
        raise Refused(f"CuPy's {name} takes no `{keyword}`. It takes {', '.join(parameters)}.")
    if any(isinstance(x, np.ndarray) for x in leaves((args, kwargs))):
        raise Refused(f"CuPy's {name} refuses to mix in a host array: move it with np.asarray(..., like=x).")
    inputs = to_plain(args), to_plain(kwargs)
    compute = partial(function, *inputs[0], **inputs[1])
    result, out = compute(), kwargs.get("out")
    if out is not None:
        QUEUE.launch(compute)
        return out[0] if isinstance(out, tuple) else out
    spies = to_spy(result)
    if computed(result, [getattr(function, "__self__", None), *leaves(inputs)]):
        QUEUE.launch(compute if result is None else partial(compute_into, spies, compute))
    return spies


def computed(results, given) -> bool:
    """Report whether the device had to compute a result, as it has not for a shape, or a view of what was given."""
    owners = [owner(x) for x in given if isinstance(x, np.ndarray)]
    return any(x is None or isinstance(x, np.generic)
               or (isinstance(x, np.ndarray) and not any(owner(x) is one for one in owners)) for x in leaves(results))


def compute_into(spies, compute) -> None:
    """Compute again what these spies are."""
    for spy, values in zip(leaves(spies), leaves(compute()), strict=True):
        spy._elements[...] = values


def check_key(key):
    for k in as_tuple(key):
        if isinstance(k, (np.ndarray, list)):
            raise Refused(f"An index on the host ({kind(k)}) would be copied to the device, unseen: make it an array "
                          "there once.")


def as_tuple(key):
    return key if isinstance(key, tuple) else (key,)


def with_ellipsis(key):
    """Return a key that gives a view even where NumPy would give a scalar."""
    key = as_tuple(key)
    return key if any(k is Ellipsis for k in key) else (*key, ...)


def leaves(value):
    """Yield the elements of nested tuples, lists and dictionaries."""
    if isinstance(value, (tuple, list, dict)):
        for element in value.values() if isinstance(value, dict) else value:
            yield from leaves(element)
    else:
        yield value


def replaced(value, old, new):
    """Copy a nest of tuples, lists and dictionaries, with `new(x)` for every x of the type `old`."""
    if isinstance(value, old):
        return new(value)
    if isinstance(value, (tuple, list)):
        return type(value)(replaced(element, old, new) for element in value)
    if isinstance(value, dict):
        return {key: replaced(element, old, new) for key, element in value.items()}
    return value


def to_plain(value):
    """Return the elements behind the spies, themselves: for this file alone."""
    return replaced(value, SpyArray, lambda spy: spy._elements)


def to_spy(value):
    """Return NumPy's results as arrays on the device, zero-dimensional ones too; views stay views."""
    def seen(host):
        spy = SpyArray.__new__(SpyArray)
        spy._elements = np.asarray(host)
        return spy
    return replaced(value, (np.ndarray, np.generic), seen)


def to_host(x):
    """Copy an array of a device, or a spy, to the host; return an array of the host as it is."""
    return x.get() if hasattr(x, "get") else x


def kind(value):
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
