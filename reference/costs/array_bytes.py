"""The bytes of arrays that exist, to compare with an inventory."""


def array_bytes(*trees, besides=()) -> int:
    """Count the bytes under all arrays in nested tuples, lists and dicts, once each, without those under `besides`."""
    found = arrays_under(trees)
    return sum(found[key] for key in found.keys() - arrays_under(besides).keys())


def arrays_under(trees) -> dict[int, int]:
    """Map the id of each array that owns memory to its bytes."""
    found, left = {}, [trees]
    while left:
        tree = left.pop()
        if isinstance(tree, dict):
            left += tree.values()
        elif isinstance(tree, (tuple, list)):
            left += tree
        elif hasattr(tree, "nbytes"):
            while getattr(tree, "base", None) is not None and hasattr(tree.base, "nbytes"):
                tree = tree.base             # a view keeps its whole base alive
            found[id(tree)] = tree.nbytes
    return found
