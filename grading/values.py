"""What travels between a check and an answer: numbers, texts, arrays, and lists, tuples and dicts of them.

An answer's process is not trusted, so nothing that comes from it is ever unpickled.
"""
import io
import json
from typing import Any

import numpy as np

LARGEST = 64 << 20      # bytes that an answer may return


def to_bytes(value: Any) -> bytes:
    """JSON, and behind it the arrays. Raises TypeError for a value of any other kind."""
    arrays: list[np.ndarray] = []
    tree = json.dumps(described(value, arrays)).encode()
    buffer = io.BytesIO()
    np.savez(buffer, *arrays)
    return b"%d\n" % len(tree) + tree + buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """The inverse. Raises ValueError for anything that `to_bytes` has not made."""
    length, _, rest = data.partition(b"\n")
    tree = json.loads(rest[:int(length)])
    with np.load(io.BytesIO(rest[int(length):]), allow_pickle=False) as arrays:
        return restored(tree, arrays)


def described(value: Any, arrays: list[np.ndarray]) -> Any:
    """A tree that JSON knows: [kind, content]. Arrays are put aside."""
    if value is None or isinstance(value, bool | int | float | str):
        return ["plain", value]
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biuf":
            raise TypeError(f"an array of {value.dtype} cannot be handed over: make it one of numbers")
        arrays.append(np.asarray(value))
        return ["array", len(arrays) - 1]
    if isinstance(value, list | tuple):
        return [type(value).__name__ if type(value) in (list, tuple) else "tuple",
                [described(item, arrays) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[described(key, arrays), described(item, arrays)] for key, item in value.items()]]
    raise TypeError(f"a {type(value).__name__} cannot be handed over: only numbers, texts, arrays, and lists, tuples "
                    "and dicts of them")


def restored(tree: Any, arrays) -> Any:
    kind, content = tree
    if kind == "array":
        return arrays[f"arr_{int(content)}"]
    if kind == "dict":
        return {restored(key, arrays): restored(item, arrays) for key, item in content}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(restored(item, arrays) for item in content)
    return content
