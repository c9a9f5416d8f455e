"""The arrays under a cache that exist, once each: their names and their bytes."""
from collections.abc import Iterator
from typing import Any, NamedTuple


class KeptArray(NamedTuple):
    """An array that owns memory, and the fields that are it, or a part of it."""

    names: list[str]
    array: Any


def array_bytes(*trees, besides=()) -> int:
    """Count the bytes under all arrays in nested tuples, lists and dicts, once each, without those under `besides`."""
    found = arrays_under(trees)
    return sum(found[key].array.nbytes for key in found.keys() - arrays_under(besides).keys())


def arrays_under(tree) -> dict[int, KeptArray]:
    """Map the id of each array that owns memory to its names in this tree, and itself."""
    found: dict[int, KeptArray] = {}
    for name, array in named_arrays(tree, ""):
        while getattr(array, "base", None) is not None and hasattr(array.base, "nbytes"):
            array = array.base             # a view keeps its whole base alive
        found.setdefault(id(array), KeptArray([], array)).names.append(name)
    return found


def named_arrays(tree, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each array of a tree with its name: `mlp.hidden` for a field of a field, `mlp.act_cache.1` in a tuple."""
    if hasattr(tree, "nbytes"):
        yield name, tree
    elif isinstance(tree, (dict, list, tuple)):
        named = (tree.items() if isinstance(tree, dict) else
                 zip(getattr(tree, "_fields", range(len(tree))), tree))
        for field, part in named:
            yield from named_arrays(part, f"{name}.{field}" if name else str(field))
