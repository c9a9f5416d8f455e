"""A kind of layer on one tensor-parallel rank. Its textbook twin is reference/layers/layer.py."""
from collections.abc import Callable
from typing import NamedTuple


class Layer(NamedTuple):
    """One kind of layer."""

    tensors: type
    forward: Callable
    backward: Callable


LAYERS: dict[type, Layer] = {}   # by the type of their tensors; layers/__init__.py lists every kind


def layer_forward(x, p, *arguments):
    """Map x [b, s, h] to y [b, s, h], both outside the region, and return the cache."""
    return LAYERS[type(p)].forward(x, p, *arguments)


def layer_backward(dy, p, cache, *arguments):
    """Return dx [b, s, h] for dy [b, s, h], both outside the region."""
    return LAYERS[type(p)].backward(dy, p, cache, *arguments)
