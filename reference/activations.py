"""The activations in a layer's cache: their names, and where a rank's elements are in the whole tensors.

A cache is a NamedTuple, whose fields tell it in their hints:

    hidden: Annotated[Any, Activation(axis=2)]       # [b, s, 4h/t]

So an observer finds the activations of every layer, and need not know the layer.
"""
from collections.abc import Callable
from functools import cache as cached
from typing import Any, NamedTuple, get_type_hints


class Activation(NamedTuple):
    """The hint of a field that holds an activation."""

    name: str = ""               # "": the field's own
    axis: int | None = None      # along which tensor parallelism shards it, if it does
    inside: bool = True          # whether it is inside the region: then a rank has all positions
    of_keys: bool = False        # whether the axis has heads of keys, of which neighbouring ranks may hold copies
    exchanged: bool = False      # whether context parallelism has exchanged heads for positions
    array: Callable = lambda field, cache: field     # from the field and its cache: the activation, or None


class Nested(NamedTuple):
    """The hint of a field that holds the cache of another layer, or None."""

    name: str = ""               # before the names of its activations
    kind: type | None = None     # a NamedTuple with its hints, where kernels make it a plain tuple
    changes: dict = {}           # what is true of its activations here, and not in general


def activations(cache, path="", kind: type | None = None):
    """Yield (name, array, Activation) for each activation in a cache; the names begin with `path`."""
    for (field, hint), value in zip(hints(kind or type(cache)), cache, strict=True):
        if isinstance(hint, Activation):
            x = hint.array(value, cache)
            if x is not None:
                yield joined(path, hint.name or field), x, hint
        elif isinstance(hint, Nested) and value is not None:
            for name, x, place in activations(value, joined(path, hint.name), hint.kind):
                yield name, x, place._replace(**hint.changes)


@cached
def hints(kind: type) -> list[tuple[str, Any]]:
    """Return the names of a NamedTuple's fields, each with its Activation or Nested, or None."""
    return [(field, getattr(hint, "__metadata__", [None])[0])
            for field, hint in get_type_hints(kind, include_extras=True).items()]


def joined(path, name):
    """Join two parts of a name, of which one may be empty."""
    return f"{path}.{name}" if path and name else path or name
