"""A kind of layer: its tensors, and the functions that compute with them. The type of the tensors tells the kind.

A block has attention, and an MLP or experts; a model chooses the kind of each, and of its norms, when it declares
tensors. From then on `layer_forward(x, p, ...)` finds the function for p. All kinds of attention, of MLP and of experts
take the same arguments, whether they need them or not:

    forward     x, p, c, context         c is the ModelConfig, `context` the layer's LayerContext
    backward    dy, p, cache, c

`order` and `products` are names for those who watch a layer at work. `entered` is the input inside the region, where
`input` is the one outside.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

from reference.activations import joined
from reference.params import children


class Layer(NamedTuple):
    """One kind of layer."""

    name: str                    # what it does in a block: attention, mlp, experts, or norm
    tensors: type
    declare: Callable            # a ModelConfig -> declarations of the tensors
    forward: Callable
    backward: Callable
    sharded_forward: Any = None                  # over lists of ranks; a norm has none: each rank normalises its own x
    sharded_backward: Any = None
    chosen: Callable = lambda c: True            # a ModelConfig -> whether it has this kind, else a later one
    order: str = ""                              # of its tensors, as they are computed; part:mlp is a layer within it
    products: dict[str, tuple[str, str]] = {}    # of each matrix: the names of what it multiplies, and of the result


LAYERS: dict[type, Layer] = {}   # by the type of their tensors; layers/__init__.py lists every kind


def declare(name, c):
    """Declare the tensors of a ModelConfig's kind of "attention", "mlp", "experts" or "norm"."""
    return next(layer for layer in LAYERS.values() if layer.name == name and layer.chosen(c)).declare(c)


def layers_in(tree, path=""):
    """Yield the path and the Layer of every layer in a tree of tensors."""
    if type(tree) in LAYERS:
        yield path, LAYERS[type(tree)]
    for key, subtree in children(tree) or ():
        yield from layers_in(subtree, joined(path, str(key)))


def layer_forward(x, p, *arguments):
    """Map x [b, s, h] -> y [b, s, h], and return the cache."""
    return LAYERS[type(p)].forward(x, p, *arguments)


def layer_backward(dy, p, cache, *arguments):
    """Return dx [b, s, h] and the gradients, of the type of p, for dy [b, s, h]."""
    return LAYERS[type(p)].backward(dy, p, cache, *arguments)


def sharded_layer_forward(xs, shards, *arguments):
    """Map each rank's input x [b, s, h] to its output y [b, s, h]; both use the layout outside the region."""
    return LAYERS[type(shards[0])].sharded_forward(xs, shards, *arguments)


def sharded_layer_backward(dys, shards, cache, *arguments):
    """Return each rank's dx [b, s, h] and gradients for its dy [b, s, h]; both use the layout outside the region."""
    return LAYERS[type(shards[0])].sharded_backward(dys, shards, cache, *arguments)
