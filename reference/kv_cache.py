"""The KV cache of generation: the keys and values that attention has computed for earlier positions.

A new token attends to all tokens before it, but only through their keys and values; and those never change, since a
token never attends to later ones. So they are kept, and each new token costs the work of one position, however many
come before it. A rank keeps them for its own heads and its own layers: 2 b s h/t elements in each layer, or with fewer
heads of keys and values than of queries, 2 b s d max(1, g/t).

Requests that come and go have a cache each, of b = 1. What all of them compute in one step is packed into one sequence:
a layer treats every token by itself, whosever it is, except in attention (Orca's "selective batching", Yu et al. 2022).
"""
from itertools import accumulate

import numpy as np


class KVCache:
    """The keys and values of one layer's heads, with room for a fixed number of positions."""

    def __init__(self, b, positions, heads, head_size, like):
        """Allocate the arrays, of the same library and format as `like`."""
        self.k, self.v = (np.empty_like(like, shape=(b, positions, heads, head_size)) for _ in "kv")
        self.length = 0     # positions so far

    def extend(self, k, v):
        """Append n positions, [b, n, g/t, d] each; return all keys and values so far, [b, length, g/t, d]: views."""
        first, self.length = self.length, self.length + k.shape[1]
        assert self.length <= self.k.shape[1], f"{self.length} positions, and room for {self.k.shape[1]}"
        self.k[:, first:self.length], self.v[:, first:self.length] = k, v
        return self.k[:, :self.length], self.v[:, :self.length]

    def attend(self, q, k, v, attention):
        """Append k and v, and return `attention` of the queries q [b, n, a/t, d] to all keys so far."""
        return attention(q, *self.extend(k, v))

    def runs(self, new):
        """Return the positions of the new tokens, which are a slice, as a list of slices."""
        return [slice(self.length + new.start, self.length + new.stop)]

    def last(self, x):
        """Return each text's last new position: x [b, n, h] -> [b, 1, h]."""
        return x[:, -1:].copy()


class PackedCache:
    """One layer's KVCaches of several requests, whose new tokens stand one after another in one sequence."""

    def __init__(self, caches, counts):
        """Take a KVCache of one text for each request, and the number of its new tokens."""
        self.caches, self.counts, self.ends = caches, counts, [*accumulate(counts)]

    def attend(self, q, k, v, attention):
        """Let each request's queries attend to its own keys: q [1, n, a/t, d], of all requests, -> [1, n, a/t, d]."""
        pieces = zip(*(np.split(x, self.ends[:-1], axis=1) for x in (q, k, v)))
        return np.concatenate([one.attend(*piece, attention) for one, piece in zip(self.caches, pieces)], axis=1)

    def runs(self, _new):
        """Return the positions of all new tokens: a slice for each request."""
        return [run for one, count in zip(self.caches, self.counts) for run in one.runs(slice(0, count))]

    def last(self, x):
        """Return each request's last new position: x [1, n, h] -> [requests, 1, h]."""
        return x[0, [end - 1 for end in self.ends], None]


def empty_kv_cache(c, layers, positions, like, b=1, t=1):
    """Return an empty KVCache for each layer, by its number, for one of t ranks."""
    return {layer: KVCache(b, positions, max(1, c.groups // t), c.head_size, like) for layer in layers}


def any_layer(kv_cache):
    """Return the cache of some layer: before a forward all layers have seen the same positions."""
    return next(iter(kv_cache.values()))


def forget(kv_cache):
    """Begin again at position 0."""
    for layer in kv_cache.values():
        layer.length = 0
