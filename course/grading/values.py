"""Values that checks and answers exchange: numbers, strings, arrays, and lists, tuples and dicts of them.

An answer's process is not trusted, so nothing that comes from it is unpickled, or used before it is checked.
"""
import json
import math
import re
from typing import Any

import numpy as np

HEAD = "!I"             # the length that precedes each message
LARGEST = 64 << 20      # bytes of a message, as of what an answer returns
TREE = 2 << 20          # bytes of these that are no elements of arrays
PRINTED = 20_000        # characters that an answer may print
TOO_MANY = "too many single values to hand over: put numbers into arrays"


def to_bytes(value: Any) -> bytes:
    """Encode as JSON, followed by the arrays' elements. Raises TypeError for a value of any other kind."""
    arrays: list[np.ndarray] = []
    tree = json.dumps(to_tree(value, arrays)).encode()
    if len(tree) > TREE:
        raise TypeError(TOO_MANY)
    return b"%d\n" % len(tree) + tree + b"".join(array.tobytes() for array in arrays)


def from_bytes(data: bytes) -> Any:
    """Decode the bytes of `to_bytes`. Raises ValueError for any others."""
    try:
        length, _, rest = data.partition(b"\n")
        if int(length) > TREE:
            raise ValueError("too many single values")
        elements = Elements(rest[int(length):])
        value = from_tree(json.loads(rest[:int(length)]), elements)
        elements.end()
        return value
    except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"this is no value that `to_bytes` has made: {error}") from None


def to_tree(value: Any, arrays: list[np.ndarray]) -> Any:
    """Return a tree for JSON: [kind, content]. Arrays are stored separately."""
    if value is None or isinstance(value, bool | int | float | str):
        return ["plain", value]
    if isinstance(value, np.ndarray | np.generic):
        value = np.asarray(value)
        if value.dtype.kind not in "biuf":
            raise TypeError(f"an array of {value.dtype} cannot be passed: make it one of numbers")
        arrays.append(value)
        return ["array", [value.dtype.str, value.shape]]
    if isinstance(value, list | tuple):
        if len(value) * len('["plain",0]') > TREE:      # refused before a tree is made of them
            raise TypeError(TOO_MANY)
        return [type(value).__name__ if type(value) in (list, tuple) else "tuple",
                [to_tree(item, arrays) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[to_tree(key, arrays), to_tree(item, arrays)] for key, item in value.items()]]
    raise TypeError(f"a {type(value).__name__} cannot be passed: only numbers, strings, arrays, and lists, tuples "
                    "and dicts of them")


class Elements:
    """The elements of all arrays, in the order in which the tree names the arrays."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def array(self, dtype: str, shape: list[int]) -> np.ndarray:
        """Return the next array. Raises ValueError for a dtype or shape that cannot be right."""
        if not re.fullmatch(r"[<>|][biuf]\d{1,2}", dtype) or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"an array of {dtype!r} and {shape!r}")
        count, start = math.prod(shape), self.at
        self.at += count * np.dtype(dtype).itemsize
        if self.at > len(self.data):
            raise ValueError("an array without its elements")
        return np.frombuffer(self.data[start:self.at], dtype).reshape(shape).copy()

    def end(self) -> None:
        """Raise ValueError if there are elements left."""
        if self.at != len(self.data):
            raise ValueError("elements without their array")


def from_tree(tree: Any, elements: Elements) -> Any:
    """Return the value of a tree that `to_tree` has made. Raises ValueError."""
    match tree:
        case ["plain", None | bool() | int() | float() | str() as value]:
            return value
        case ["array", [dtype, shape]]:
            return elements.array(dtype, shape)
        case ["dict", items]:
            return {from_tree(key, elements): from_tree(item, elements) for key, item in items}
        case ["list" | "tuple" as kind, items]:
            return (list if kind == "list" else tuple)(from_tree(item, elements) for item in items)
    raise ValueError(f"a value of the kind {tree!r}"[:99])
