"""The KV cache of generation: the keys and values that attention has computed for earlier positions.

A new token attends to all tokens before it, but only through their keys and values; and those never change, since a
token never attends to later ones. So they are kept, and each new token costs the work of one position, however many
come before it. A rank keeps them for its own heads and its own layers: 2 b s h/t elements in each layer, or with fewer
heads of keys and values than of queries, 2 b s d max(1, g/t).
"""
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


def empty_kv_cache(c, layers, positions, like, b=1, t=1):
    """Return an empty KVCache for each layer, by its number, for one of t ranks."""
    return {layer: KVCache(b, positions, max(1, c.groups // t), c.head_size, like) for layer in layers}


def length_of(kv_cache):
    """Return the number of positions in the cache: all layers have the same number before a forward."""
    return next(iter(kv_cache.values())).length


def forget(kv_cache):
    """Begin again at position 0."""
    for layer in kv_cache.values():
        layer.length = 0
