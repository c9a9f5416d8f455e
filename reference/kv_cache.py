"""The KV cache of generation: attention's keys and values of all earlier positions.

A new token attends to all tokens before it, but reads only their keys and values; and those do not change, since a
token never attends to later ones. So they are cached, and a token costs the work of one position, however long the
prefix. A rank caches its own heads, of its own layers: 2 b s h/t elements a layer.
"""
import numpy as np


class Past:
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


def no_past(c, layers, positions, like, b=1, t=1):
    """By layer a Past that is still empty, for one of t ranks."""
    return {layer: Past(b, positions, c.num_attention_heads // t, c.head_size, like) for layer in layers}


def length_of(past):
    """Positions that are behind layers which follow one another; as many for each, before they go on."""
    return next(iter(past.values())).length


def forget(past):
    """Begin again, at position 0."""
    for layer in past.values():
        layer.length = 0
