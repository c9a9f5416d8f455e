"""The structs that kernels take, as NumPy arrays of one element, or ctypes's own."""
import ctypes
from math import prod

import numpy as np

# common.cuh's Site, softmax.cu's Rows, heads.cpp's Heads, adam.cu's Runs, and products.cpp's Product
SITE: np.dtype = np.dtype([("first", "u8"), ("along", "u8", 3), ("key", "u4", 2), ("threshold", "u4"),
                           ("second", "u4"), ("third", "u4"), ("dropping", "u4"), ("scale", "f8")])
ROWS: np.dtype = np.dtype([("offset", "u8"), ("head_step", "u8"), ("row_step", "u8"), ("first_query", "i4"),
                           ("queries", "i4"), ("keys", "i4"), ("width", "i4")])
STRIDES: np.dtype = np.dtype([("sample", "u8"), ("position", "u8"), ("head", "u8")])
HEADS: np.dtype = np.dtype([*((name, STRIDES) for name in ("q", "k", "v", "context")),
                            *((name, "i4") for name in ("s", "keys", "heads", "groups", "d"))])
RUNS: np.dtype = np.dtype([("ends", "u8", 33), ("count", "i4"), ("first_decays", "i4")])


class Product(ctypes.Structure):
    """The strides and sizes of a matrix product. A ctypes structure is quicker to build than a NumPy record."""

    _fields_ = [*((name, ctypes.c_uint64) for name in ("a_row", "a_column", "b_row", "b_column", "c_row")),
                *((name, ctypes.c_int) for name in ("m", "n", "k", "add"))]


NO_SITE = np.array([(0, (0, 0, 0), (0, 0), 0, 1, 1, 0, 1.0)], SITE)


def site_of(site, shape) -> np.ndarray:
    """Describe a Site (reference/random/dropout.py) for an array of at most four dimensions: [b, s, h] or [b, a, s, s].

    A site that is None drops nothing. Two runs of positions are an axis more: [b, 2, s/2, h].
    """
    if site is None:
        return NO_SITE
    steps, starts = [prod(site.whole[axis + 1:]) for axis in range(len(shape))], site.first
    if isinstance(starts[1], tuple):
        sample, (front, back), *others = starts
        steps, starts = [steps[0], (back - front) * steps[1], *steps[1:]], (sample, 0, front, *others)
        shape = (shape[0], 2, shape[1] // 2, *shape[2:])
    first = sum(start * step for start, step in zip(starts, steps)) % 2**64
    along, (second, third) = (0, 0, *steps[:-1])[-3:], (1, 1, *shape[:-1])[-2:]
    return np.array([(first, along, site.key, site.threshold, second, third, 1, site.scale)], SITE)


def runs_of(runs: list[tuple[slice, bool]]) -> list[np.ndarray]:
    """Describe runs of neighbouring elements, of which every other one has weight decay, 32 at a time."""
    ends = [runs[0][0].start, *(part.stop for part, _ in runs)] if runs else [0]
    found = []
    for first in range(0, len(runs), 32):
        some = ends[first:first + 33]
        found.append(np.array([(some + [0] * (33 - len(some)), len(some) - 1, runs[first][1])], RUNS))
    return found


def rows_of(offset: int, head: tuple[int, int], first_query: int, queries: int, keys: int) -> np.ndarray:
    """Locate the rows of some queries of some heads in probabilities [b, a, *head], from element `offset` on."""
    return np.array([(offset, prod(head), head[1], first_query, queries, keys, head[1])], ROWS)


def heads_of(q, k, v, context) -> np.ndarray:
    """Locate the heads in arrays [b, queries, heads, d] of q's sizes and [b, keys, groups, d] of k's."""
    strides = [tuple(step // q.itemsize for step in x.strides[:3]) for x in (q, k, v, context)]
    return np.array([(*strides, q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])], HEADS)


def product_of(a, b, c, add: bool) -> Product:
    """Locate the elements of c [m, n] = a [m, k] @ b [k, n]."""
    steps = [step // x.itemsize for x in (a, b) for step in x.strides]
    return Product(*steps, c.strides[0] // c.itemsize, *c.shape, len(b), add)


def whole_heads(x):
    """Return x [b, s, heads, d], or a copy in which the d numbers of a head are next to one another."""
    return x if x.strides[-1] == x.itemsize else x.copy()
