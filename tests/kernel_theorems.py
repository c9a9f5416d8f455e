"""The theorem of the table of kernels: each function of each column is the textbook's, on the same numbers in float64.

`ARGUMENTS` has a row for each kernel: how its arguments are drawn, and how far halves may be off. A `Drawing` draws
them for one column, in one format, in the memory where that column works; the other side gets copies of them.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from mpi_impl import kernels
from mpi_impl.runtime.arrays import dtype_of, is_half
from reference import ops
from reference.layers import rope
from reference.layers.cross_entropy import softmax_minus_target
from reference.ops import CoreInputs
from reference.optimizers import adam as formulas
from reference.optimizers.adam import OptimizerConfig
from reference.precision import FORMATS
from reference.random import counter_rng
from reference.random.dropout import Site
from tests.cases import close
from tests.reference.test_ops import lengths

TABLE = {name: row for name, row in vars(kernels).items() if isinstance(row, kernels.Kernel)}
WIDE, HALVES = ("float64", "float32"), ("float16", "bfloat16")
LAYOUTS = st.sampled_from(["rows", "apart", "columns", "neither"])
WORDS = st.integers(0, 2**32 - 1)


def column(index: int) -> SimpleNamespace:
    """Return the functions of a column of the table."""
    return SimpleNamespace(**{name: row[index] for name, row in TABLE.items()})


# ---- the definitions ------------------------------------------------------------------------------------------------


def exp_and_sum(logits, highest):
    exp = np.exp(logits - highest[..., None])
    return exp, exp.sum(-1)


def cross_entropy_backward(exp, highest, total, dloss, ids, held):
    return softmax_minus_target(dloss, exp / total[..., None], ids, held)


def adam_update(states, grad, model, runs, factor, step, rate, config):
    param, m, v = states
    grad *= factor
    for part, decays in runs:
        formulas.adam_update(param[part], grad[part], m[part], v[part], step, rate, decays, config)
    if model is not None:
        model[...] = param


def activation_backward(dy, cache, activation):
    dx = ops.ACTIVATIONS[activation][1](dy, cache)
    return dx, ops.rows(dx).sum(0)


# Where plain.py is the table's textbook, the definition is here.
DEFINITIONS = column(kernels.TEXTBOOK)
vars(DEFINITIONS).update(
    exp_and_sum=exp_and_sum, cross_entropy_backward=cross_entropy_backward, adam_update=adam_update,
    activation_backward=activation_backward,
    add_to=lambda y, x: y + x, total=lambda dy: dy.sum(0), sum_of_squares=lambda x: (x**2).sum(),
    accumulate=lambda grad, x, dy: grad + np.tensordot(x, dy, (range(x.ndim - 1),) * 2))


# ---- both sides of an example ---------------------------------------------------------------------------------------


@dataclass
class Sides:
    """A value that the two sides do not share: a cache, or a part of a longer buffer."""

    mine: Any
    theirs: Any


def is_array(x) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def mapped(function: Callable, value):
    """Apply a function to all arrays in nested tuples and lists."""
    if isinstance(value, (tuple, list)):
        parts = [mapped(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value) if is_array(value) else value


def flat(value) -> list:
    """Return what nested tuples and lists hold, in order, except None."""
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in flat(part)]
    return [] if value is None else [value]


def on_host(x):
    return x if isinstance(x, (np.ndarray, np.generic)) else x.get()


def in_float64(x):
    """Copy an array to the host, one of floats in float64."""
    x = on_host(x)
    return x.astype(np.float64) if is_half(x) or x.dtype == np.float32 else x.copy()


def stays(form: str) -> str:
    """Return the format of numbers that are not rounded to 16 bits: statistics, gradients of parameters."""
    return "float64" if form == "float64" else "float32"


def bound_of(form: str, roundings: float) -> float:
    """Return the tolerance of `close`: for halves this many roundings, and the error of float32."""
    return {"float64": 1e-11, "float32": 2e-5}.get(form) or roundings * FORMATS[form].epsilon / 2 + 1e-4


@dataclass
class Drawing:
    """The draws of one example."""

    data: Any                           # hypothesis's
    form: str
    mine: SimpleNamespace               # the functions of a column
    put: Callable = np.array            # copies an array of the host to where the column works
    away: bool = False                  # whether that is not the host, but a device, or stands for one
    on_device: bool = False             # with its own kernels
    compiled: bool = False              # by kernels that round halves where a GPU's do
    positions: Any = None               # of attention
    padding: Any = None                 # where samples are shorter: bool [b, s]
    formats: dict[int, str] = field(default_factory=dict)   # of results that are in another one than expected
    watched: list = field(default_factory=list)             # further arrays that must agree afterwards, as Sides

    def __post_init__(self):
        self.rng = np.random.default_rng(self.data.draw(WORDS, "seed"))

    @property
    def half(self) -> bool:
        return self.form in HALVES

    def size(self, most: int, on_a_device: int | None = None, least: int = 1) -> int:
        """Draw a size. Emulations are slow, and have sizes of their own."""
        return self.data.draw(st.integers(least, on_a_device if on_a_device and self.on_device else most))

    def flag(self) -> bool:
        return self.data.draw(st.booleans())

    def rows(self) -> tuple[int, int]:
        """Draw the shape of all axes but the last: few rows, or many."""
        return self.size(2), self.size(8) if self.flag() else self.size(150, 20)

    def width(self, least: int = 1) -> int:
        """Draw the length of a row: one that 16 bytes divide, or one that they do not."""
        return self.data.draw(st.one_of(st.integers(least, 90), st.sampled_from([64, 128, 160, 200])))

    def host(self, *shape, form: str | None = None):
        return self.rng.normal(size=shape).astype(dtype_of(form or self.form))

    def array(self, *shape, form: str | None = None):
        return self.put(self.host(*shape, form=form))

    def numbers(self, *shape):
        """Draw an array in the format of statistics."""
        return self.array(*shape, form=stays(self.form))

    def lying(self, *shape, shift: float = 0.0, scale: float = 1.0):
        """Draw an array in any layout."""
        x = (scale * self.rng.normal(size=shape) + shift).astype(dtype_of(self.form))
        return laid_out(x, self.data.draw(LAYOUTS), self.put)

    def ids(self, n: int, *shape):
        return self.put(self.rng.integers(n, size=shape))

    def site(self, *shape):
        return self.data.draw(st.none() | sites(*shape))

    def lengths(self, b: int, s: int):
        found = self.data.draw(lengths(b, s))
        if found is None:
            return None
        self.padding = np.arange(s) >= found[:, None]
        return self.put(found)

    def same_to_both(self, cache, name: str) -> Sides:
        """Pair a cache that begins with the function's input with the other side's cache of that input."""
        x = cache if is_array(cache) else cache[0]
        return Sides(cache, getattr(DEFINITIONS, name)(in_float64(x))[1])


def laid_out(x, how: str, put: Callable):
    """Copy x [..., r, c] in this layout: contiguous rows, rows apart, contiguous columns, or neither.

    Where rows are apart, halves begin 2 bytes after a multiple of 4, as any of them may in a flat buffer.
    """
    if how == "apart":
        wider = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 3), x.dtype)
        wider[..., 1:1 + x.shape[-1]] = x
        return put(wider)[..., 1:1 + x.shape[-1]]
    if how == "columns" and x.ndim > 1:
        return put(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)
    if how == "neither":
        return put(np.repeat(x, 2, -1))[..., ::2]
    return put(x)


@st.composite
def sites(draw, *shape):
    """Draw a Site for an array of this shape. Its first sample b may be so large that an index is near a multiple of
    2^32.
    """
    first = [draw(st.integers(0, 5)) for _ in shape]
    whole = [length + start + draw(st.integers(0, 3)) for length, start in zip(shape, first)]
    near = draw(st.sampled_from([0, 2**32, 2**33, 7 * 2**32, 2**40])) + draw(st.integers(-200, 200))
    first[0] = max(0, near) // math.prod(whole[1:])
    return Site((draw(WORDS), draw(WORDS)), draw(st.sampled_from([0.1, 0.5, 0.9])), (0, *whole[1:]), tuple(first))


# ---- arguments ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """How a kernel's arguments are drawn, and what is asked of its results."""

    arguments: Callable                 # of a Drawing
    roundings: float = 1                # of halves in compiled kernels, one after the other
    numbers: tuple[int, ...] = ()       # results that are not rounded to halves
    writes: int | None = None           # the argument that the result is written over, and is
    spoils: tuple[int, ...] = ()        # arguments that may have changed afterwards
    seen: Callable = flat               # the results to compare: caches may differ
    zeros: tuple[int, ...] = ()         # results of which 0 is 0, and not only near it
    padded: tuple[int, ...] = ()        # results that are 0 in the padding
    elementwise: bool = False           # each half is rounded once, also where others are larger
    composed: bool = False              # several kernels, each of which rounds
    through_halves: bool = False        # numbers that are computed from rounded ones


def linear(d):
    h, m = d.size(50), d.size(50)
    return [d.lying(*d.rows(), h), d.lying(h, m), d.array(m) if d.flag() else None]


def activated_linear(d):
    x, w, _ = linear(d)
    return [x, w, d.array(w.shape[1]), d.data.draw(st.sampled_from(sorted(kernels.ACTIVATIONS)))]


def add_to(d):
    y = d.lying(*d.rows(), d.width())
    return [y, d.lying(*y.shape) if d.flag() else d.array(y.shape[-1])]


def parts_of_ranks(d):
    size, shape = d.size(4, least=2), (d.size(60), d.size(60))
    return [d.lying(size, *shape), d.data.draw(st.sampled_from(["sum", "max"])), d.array(*shape)]


def stack(d):
    shape = *d.rows(), d.size(9), d.size(9)
    return [[d.lying(*shape) for _ in range(d.size(3))]]


def accumulate(d):
    rows, h, m = d.rows(), d.size(20), d.size(20)
    return [d.numbers(h, m), d.lying(*rows, h), d.lying(*rows, m)]


def total(d):
    """Draw also no rows, for a core: an expert may get no token."""
    return [d.lying(d.size(30, least=d.on_device), *(d.size(9) for _ in range(d.size(2))))]


def lookup_backward(d):
    rows, words, h = d.rows(), d.size(9), d.size(20)
    return [d.lying(*rows, h), d.ids(words, *rows), d.numbers(words, h)]


def activation(d):
    return [d.lying(*d.rows(), d.width())]


def gate(d):
    return [d.lying(*d.rows(), 2, d.width(), scale=2.0)]


def slope(name: str):
    """Return the arguments of GeLU's backward, which may be behind a linear layer."""
    def arguments(d):
        if d.flag():
            return biased_slope(d, name)[:2]
        (x,) = activation(d)
        return [d.lying(*x.shape), slope_cache(d, getattr(d.mine, name)(x)[1], name)]

    return arguments


def biased_slope(d, name: str | None = None):
    x, w, b, drawn = activated_linear(d)
    name = name or drawn
    cache = d.mine.activated_linear(x, w, b, name)[1]
    return [d.lying(*x.shape[:-1], w.shape[1]), slope_cache(d, cache, name), name]


def slope_cache(d, cache, name: str):
    return cache if name == "relu" else d.same_to_both(cache, name)


def gate_backward(d):
    (x,) = gate(d)
    return [d.lying(*x.shape[:-2], x.shape[-1]), d.same_to_both(d.mine.swiglu(x)[1], "swiglu")]


def norm(tensors: int):
    def arguments(d):
        h = d.width(2)
        return [d.lying(*d.rows(), h, shift=5 - 2 * tensors), *(d.array(h) for _ in range(tensors)), 1e-3]

    return arguments


def norm_backward(name: str, tensors: int):
    def arguments(d):
        x, weight, *others = norm(tensors)(d)
        around = [d.array(*x.shape)] if d.flag() else []
        return [d.lying(*x.shape), weight, getattr(d.mine, name)(x, weight, *others)[1], *around]

    return arguments


def dropout(d):
    shape = d.size(3), d.size(9, 5), d.size(150, 70)
    return [d.lying(*shape), d.data.draw(sites(*shape))]


def dropout_backward(d):
    """Draw infinities: what is dropped is 0 whatever it was, so there is no overflow."""
    x, site = dropout(d)
    dy = d.host(*x.shape)
    dy[..., ::2] = np.inf
    return [d.put(dy), d.mine.dropout(x, site)[1]]


def branch(d):
    y, site = dropout(d)
    return [y, d.lying(*y.shape), site if d.flag() else None]


def branch_and_norm(d):
    """Draw rows with a deviation that does not magnify what was rounded away."""
    shape = d.size(3), d.size(9, 5), d.size(150, 70, least=16)
    y, x, weight, bias = d.lying(*shape), d.lying(*shape), d.array(shape[-1]), d.array(shape[-1])
    return [y, x, d.site(*shape), weight, bias, 1e-3]


def rotation(d):
    """Draw also heads of which rope rotates a part, and keys that lie beside values in one array."""
    b, s, a, pairs, rest = d.size(3), d.size(5), d.size(3), d.size(20), d.size(3, least=0)
    angles = rope.rotary_cos_sin(s, 2 * pairs, d.host(1))
    return [d.array(b, s, 2, a, 2 * pairs + rest)[:, :, 0], tuple(map(d.put, angles))]


def attention(d):
    """Draw q, k and v as the layer hands them over: views of one array."""
    b, g, each, size = d.size(3, 2), d.size(3), d.size(4, 2), d.size(40, 6)
    s, a = d.size(70, 12) if d.positions is None else d.data.draw(d.positions), g * each
    qkv = d.array(b, s, 3, a, size)
    return CoreInputs(*(qkv[:, :, i, :heads] for i, heads in enumerate((a, g, g))), d.flag(), d.site(b, a, s, s),
                      d.lengths(b, s))


def attention_backward(d):
    inputs = attention(d)
    cache = d.mine.attention_core(*inputs)[1]
    theirs = DEFINITIONS.attention_core(*mapped(in_float64, inputs))[1]
    return [d.array(*inputs.q.shape), Sides(cache, theirs)]


def with_probs(result) -> list:
    """Return attention's result, and of its cache, if it has any, the probabilities and the mask where they are not 0.
    """
    *context, cache = result if type(result) is tuple else (result,)
    probs, mask = (getattr(cache, name, None) for name in ("probs", "mask"))
    return flat((context, probs, mask and mask.keep & (probs != 0)))


def cached_attention(d):
    """Draw keys and values in a buffer with room for more."""
    b, n, g, size = d.size(3), d.size(12), d.size(3), d.size(6)
    m = n + d.size(12) - 1
    both = d.array(2, b, m + 3, g, size)
    return [d.array(b, n, d.size(3) * g, size), *(both[i, :, :m] for i in range(2))]


def block(d):
    """Draw also keys that several heads share, and samples of which no key is real."""
    diagonal, b, n, g, each, size = d.flag(), *map(d.size, (3, 12, 3, 3, 5))
    m, heads = n if diagonal else d.size(12), g * each
    site = Site((3, 4), 0.3, (0, heads + 1, n + 5, m + 4), (2, 1, 5, 3)) if d.flag() else None
    real = d.put(d.rng.integers(-2, m + 2, b)) if d.flag() else None
    return [d.array(b, n, heads, size), *(d.array(b, m, g, size) for _ in "kv"), diagonal, site, real]


def block_backward(d):
    """Draw the statistics of all blocks, of which others have raised the maximum."""
    arguments = block(d)
    b, n, heads, _ = shape = arguments[0].shape
    along, highest, total = (d.host(b, heads, n, 1, form=stays(d.form)) for _ in range(3))
    return [d.array(*shape), *map(d.put, (along, abs(highest) + 3, abs(total) + 3)), *arguments]


def logits(d):
    return [d.put(3 * d.host(*d.rows(), d.width()))]


def exponentials(d):
    """Draw statistics of halves in float32 or, on request, in halves."""
    (x,) = logits(d)
    stats = stays(d.form) if d.flag() else d.form
    d.formats = {0: stats}
    highest = d.put(on_host(x).max(-1).astype(dtype_of(stats)))
    return [Sides(x, in_float64(x)), highest]


def kept_exponentials(result) -> list:
    """Return the sums and the exponentials: of halves the logits are kept, so the sums alone."""
    kept, sums = result
    return [sums] if is_half(kept) else [sums, kept]


def loss_backward(d):
    x, highest = exponentials(d)
    kept, sums = d.mine.exp_and_sum(x.mine, highest)
    exp = DEFINITIONS.exp_and_sum(in_float64(kept), in_float64(highest))[0] if d.half else in_float64(kept)
    ids, held = d.ids(kept.shape[-1], *highest.shape), d.put(d.rng.random(highest.shape) < 0.7)
    dloss = d.array(*highest.shape, form=d.formats.pop(0))
    return [Sides(kept, exp), highest, sums, dloss, ids, held]


def adam(d):
    """Draw a part of a longer buffer, in runs with weight decay and without; halves get master weights in float32."""
    start, ends = d.size(500), np.cumsum([0, 7, *d.data.draw(st.lists(st.integers(1, 200), max_size=5))]).tolist()
    runs = [(slice(one, other), i % 2 == 0) for i, (one, other) in enumerate(zip(ends, ends[1:]))]
    size, place = start + ends[-1] + 3, slice(start, start + ends[-1])
    buffers = [*(d.numbers(size) for _ in range(3)), d.put(abs(d.host(size, form=stays(d.form))))]
    d.watched = [Sides(x, in_float64(x)) for x in buffers]
    if d.half:
        d.watched.append(Sides(x := d.put(np.zeros(size, dtype_of(d.form))), in_float64(x)))
    param, grad, m, v, *model = (Sides(x.mine[place], x.theirs[place]) for x in d.watched)
    states = Sides([x.mine for x in (param, m, v)], [x.theirs for x in (param, m, v)])
    factor = d.data.draw(st.sampled_from([1.0, 0.3]))
    config = OptimizerConfig(1e-2, 10, weight_decay=0.1)
    return [states, grad, *(model or [None]), runs, factor, d.size(5), 0.01, config]


def squares(d):
    if d.on_device:
        d.formats = {0: "float64"}
    return [d.array(d.size(2000))]


def result_and_kept(result) -> list:
    """Return an activation's result, and the input that its cache begins with."""
    y, cache = result
    kept = cache if is_array(cache) else cache[0]
    return [y] if kept.dtype == bool else [y, kept]


ARGUMENTS = {
    "linear": Row(linear, 3),
    "add_to": Row(add_to, writes=0),
    "sum_in_rank_order": Row(parts_of_ranks, writes=2),
    "stack": Row(stack),
    "accumulate": Row(accumulate, numbers=(0,), writes=0),
    "total": Row(total, numbers=(0,)),
    "lookup_backward": Row(lookup_backward, numbers=(0,), writes=2),
    "gelu": Row(activation, seen=result_and_kept),
    "gelu_backward": Row(slope("gelu"), 2),
    "gelu_exact": Row(activation, seen=result_and_kept),
    "gelu_exact_backward": Row(slope("gelu_exact"), 2),
    "relu": Row(activation, zeros=(0,)),
    "relu_backward": Row(slope("relu"), zeros=(0,)),
    "swiglu": Row(gate, 2, seen=result_and_kept),
    "swiglu_backward": Row(gate_backward, 3),
    "activated_linear": Row(activated_linear, 5, seen=result_and_kept, composed=True),
    "activation_backward": Row(biased_slope, 4, numbers=(1,), composed=True, through_halves=True),
    "layer_norm": Row(norm(2), 2, numbers=(2,)),
    "layer_norm_backward": Row(norm_backward("layer_norm", 2), 2, numbers=(1, 2)),
    "rms_norm": Row(norm(1), 2, numbers=(2,)),
    "rms_norm_backward": Row(norm_backward("rms_norm", 1), 2, numbers=(1,)),
    "dropout": Row(dropout, zeros=(0,)),
    "dropout_backward": Row(dropout_backward, zeros=(0,)),
    "add_branch": Row(branch, 2, spoils=(0,), composed=True),
    "add_branch_and_norm": Row(branch_and_norm, 6, numbers=(-1,), spoils=(0,), composed=True, through_halves=True),
    "rotate": Row(rotation, elementwise=True),
    "rotate_backward": Row(rotation, elementwise=True),
    "attention_core": Row(attention, 4, seen=with_probs, zeros=(0, 1)),
    "attention_core_again": Row(lambda d: [attention(d)], seen=with_probs, zeros=(0,)),
    "attention_core_backward": Row(attention_backward, 16, padded=(1, 2)),
    "cached_attention": Row(cached_attention, 4),
    "block_attention": Row(block, 16, numbers=(0, 1, 2), through_halves=True),
    "block_attention_backward": Row(block_backward, 16, numbers=(0, 1, 2), through_halves=True),
    "largest": Row(logits),
    "exp_and_sum": Row(exponentials, 2, writes=0, seen=kept_exponentials),
    "cross_entropy_backward": Row(loss_backward, 2, writes=0),
    "adam_update": Row(adam, numbers=(0, 1, 2, 3), elementwise=True),
    "sum_of_squares": Row(squares),
}


# ---- the theorem ----------------------------------------------------------------------------------------------------


def is_the_textbooks(name: str, d: Drawing) -> None:
    """Compare a kernel's results with the textbook's: formats, values, and zeros where they must be."""
    row, (found, expected) = ARGUMENTS[name], results(name, d)
    assert len(found) == len(expected) or d.half and len(found) < len(expected), "results are missing"
    for i, (actual, wanted) in enumerate(zip(found, expected)):
        if not is_array(actual) or actual.dtype == bool:
            np.testing.assert_array_equal(actual, wanted)
            continue
        number = i in row.numbers or i - len(found) in row.numbers
        form = d.formats.get(i, stays(d.form) if number else d.form)
        assert actual.dtype == dtype_of(form), f"result {i} is of {actual.dtype}, not {form}"
        roundings = row.roundings if d.on_device or d.compiled or row.composed or row.through_halves else 1
        near(actual, wanted, bound_of(d.form if row.through_halves else form, roundings))
        if row.elementwise and is_half(actual):
            limit = FORMATS[form].epsilon / 2 * abs(wanted) + 1e-6 * max(1.0, abs(wanted).max())
            assert (abs(actual.astype(np.float64) - wanted) <= limit).all()
        assert i not in row.zeros or (actual[wanted == 0] == 0).all(), "what should be 0 is only near it"
        assert i not in row.padded or d.padding is None or (actual[d.padding] == 0).all(), "a gradient of padding"


def results(name: str, d: Drawing) -> tuple[list, list]:
    """Return the results of both sides, on the host, with the arrays that are watched.

    Assert that the kernel leaves its results where its arguments are, and overwrites none of these that it should not.
    """
    row = ARGUMENTS[name]
    arguments = row.arguments(d)
    mine = [x.mine if isinstance(x, Sides) else x for x in arguments]
    theirs = [x.theirs if isinstance(x, Sides) else mapped(in_float64, x) for x in arguments]
    result = getattr(d.mine, name)(*mine)
    assert not d.away or not any(isinstance(x, (np.ndarray, np.generic)) for x in flat(result)), "copied to the host"
    for i, x in enumerate(arguments):
        if i not in (row.writes, *row.spoils) and not isinstance(x, Sides):
            for now, before in zip(flat(mapped(in_float64, x)), flat(theirs[i]), strict=True):
                np.testing.assert_array_equal(now, before)
    if row.writes is not None:
        assert result is None or flat(result)[0] is mine[row.writes], "written elsewhere"
        result = mine[row.writes] if result is None else result
    expected = getattr(DEFINITIONS, name)(*theirs)
    found = row.seen(mapped(on_host, result)) + [on_host(x.mine) for x in d.watched]
    return found, row.seen(expected) + [x.theirs for x in d.watched]


def near(actual, expected, tolerance: float) -> None:
    """Assert that arrays are close, and equal where numbers are infinite."""
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.asarray(actual)[~finite], expected[~finite])
    close(np.where(finite, actual, 0).astype(np.float64), np.where(finite, expected, 0), tolerance)


# ---- arguments that are not drawn -----------------------------------------------------------------------------------


def far_out(functions, form: str, put) -> None:
    """Assert that activations and gates far below 0 give 0 with slope 0, and far above themselves with slope 1."""
    x = np.array([[-1e4, -800, 800, 1e4]], dtype_of(form))
    above = (x > 0).astype(x.dtype)
    for name in ("gelu", "gelu_exact"):
        y, cache = getattr(functions, name)(put(x))
        dx = getattr(functions, f"{name}_backward")(put(np.ones_like(x)), cache)
        assert (on_host(y) == x * above).all() and (on_host(dx) == above).all()
    y, cache = functions.swiglu(put(np.stack([x, np.full_like(x, 2)], 1)))
    assert (on_host(y) == 2 * x * above).all()
    dx = functions.swiglu_backward(put(np.ones_like(x)), cache)
    assert (on_host(dx) == np.stack([2 * above, x * above], 1)).all()


def bits_around_a_carry(functions, put) -> None:
    """Assert that rows in which the low word of an index begins again at 0 have the textbook's bits, one by one."""
    for before, length, multiple in product(range(9), (8, 3), (1, 2**20)):
        first = multiple * 2**32 - before
        index = np.arange(first, first + length, dtype=np.uint64)
        bits = counter_rng.bits((123, 456), index)
        for threshold in bits.tolist():                              # one of the bits is the threshold itself
            site = Site((123, 456), threshold / 2**32, (0, first, 1), (1, 0, 0))
            mask = functions.dropout(put(np.ones((1, 1, length))), site)[1]
            assert (on_host(mask.keep) == (bits >= threshold)).all()
