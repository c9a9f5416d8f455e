"""The values that travel between checks and answers: they arrive unchanged, no other types travel, and no bytes can do
harm.
"""
import json
import pickle
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from course.grading.values import from_bytes, to_bytes

DTYPES = st.one_of(hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?"),
                   hnp.unsigned_integer_dtypes(endianness="?"),
                   hnp.floating_dtypes(endianness="?"))
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0, max_dims=4))
PLAIN = st.none() | st.booleans() | st.integers(-10**30, 10**30) | st.floats() | st.text()
TREES = st.recursive(PLAIN | ARRAYS, lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) |
                     st.dictionaries(st.text() | st.integers(), inner, max_size=4), max_leaves=12)


@given(TREES)
def test_a_tree_of_numbers_texts_and_arrays_arrives_as_it_was(tree):
    """Bytes name the kind of each value, and each array's kind and shape."""
    assert to_bytes(from_bytes(to_bytes(tree))) == to_bytes(tree)


def test_a_view_arrives_as_what_it_shows_and_may_be_written_to():
    view = np.arange(12).reshape(3, 4).T[::-1, ::2]
    (found, number), kinds = from_bytes(to_bytes([(view, 1.0), {2: True}]))
    assert np.array_equal(found, view) and kinds == {2: True} and type(number) is float
    found[...] = 1


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", np.array([1j]), np.array([None]), [[{"a": object()}]]],
                         ids=lambda value: type(value).__name__)
def test_anything_else_is_a_type_error(value):
    with pytest.raises(TypeError, match="cannot be passed"):
        to_bytes(value)


@given(TREES, st.integers(0, 10**6), st.binary(max_size=60))
def test_bytes_that_were_tampered_with_are_a_value_error_or_a_value(tree, place, other):
    """Never anything else; nor is garbage."""
    data = to_bytes(tree)
    place %= len(data)
    for forged in other, b"%d\n" % len(other) + other, data[:place] + other[:3] + data[place + len(other[:3]):]:
        with suppress(ValueError):
            from_bytes(forged)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


def encode(tree, rest: bytes = b"") -> bytes:
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return b"%d\n" % len(text) + text + rest


@pytest.mark.parametrize("data", [
    pickle.dumps(Bomb()), encode(["array", ["|O", [1]]], pickle.dumps(Bomb())), b"-1\n[]",
    encode(["array", ["(1000000,1000000)f8", [1]]]), encode(["array", ["<f8", [10**15]]]),
    encode(["array", ["<f8", [-1]]]), encode(["array", ["<f8", [2]]], bytes(17)),
    encode(["dict", [[["list", []], ["plain", 1]]]]), encode(["set", []]),
    encode(b"[" * 100_000),
], ids=lambda data: repr(data[:30]))
def test_what_a_forger_would_send_is_a_value_error(data):
    """And nothing is unpickled, or allocated for elements that are not there."""
    with pytest.raises(ValueError, match="no value"):
        from_bytes(data)
