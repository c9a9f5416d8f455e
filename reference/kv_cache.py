"""The key/value cache of generation: what attention has made of the positions that are behind.

A new word looks at all words before it, but only at their keys and values; and those stay as they are, since a word
never looks ahead. So they are kept, and a word costs the work of one position, whatever is before it. A rank keeps them
for its own heads, of its own layers: 2 b s h/t elements of each layer.
"""
import numpy as np


class KVCache:
    """The keys and values of one layer's heads, with room for so many positions."""

    def __init__(self, b, positions, heads, head_size, like):
        """They are of the kind of `like`."""
        self.k, self.v = (np.empty_like(like, shape=(b, positions, heads, head_size)) for _ in "kv")
        self.length = 0     # positions so far

    def extend(self, k, v):
        """Those of the n positions that follow, [b, n, a/t, d] -> those of all so far, [b, length, a/t, d]: views."""
        first, self.length = self.length, self.length + k.shape[1]
        assert self.length <= self.k.shape[1], f"{self.length} positions, and room for {self.k.shape[1]}"
        self.k[:, first:self.length], self.v[:, first:self.length] = k, v
        return self.k[:, :self.length], self.v[:, :self.length]


def empty_kv_cache(c, layers, positions, like, b=1, t=1):
    """By layer a KVCache that is still empty, for one of t ranks."""
    return {layer: KVCache(b, positions, c.num_attention_heads // t, c.head_size, like) for layer in layers}


def length_of(kv_cache):
    """Positions that are behind layers which follow one another; as many for each, before they go on."""
    return next(iter(kv_cache.values())).length


def forget(kv_cache):
    """Begin again, at position 0."""
    for layer in kv_cache.values():
        layer.length = 0
