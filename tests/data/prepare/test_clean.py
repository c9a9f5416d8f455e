"""Normalization: what is removed, what stays, and that once is enough."""
import unicodedata

import pytest
from hypothesis import given, strategies as st

from mpi_impl.data.prepare.clean import normalize

TEXT = st.text("ab \t\n\r\x00\x0c\x1c\x1f\x85\u2028\ufeff\u00e9e\u0301\u00a0", max_size=30) | st.text(max_size=30)


@given(TEXT)
def test_a_normal_text_has_one_spelling_and_all_words(text):
    """No control character but tabs and newlines, no blank before a line's end, composed characters only; a normal text
    is left alone. But for control characters, the words are those that were there, in order.
    """
    normal = normalize(text)
    assert normalize(normal) == normal
    assert all(unicodedata.category(c) != "Cc" or c in "\t\n" for c in normal)
    assert all(line == line.rstrip() for line in normal.split("\n"))
    assert unicodedata.is_normalized("NFC", normal) and normal == normal.strip("\n")
    words = "".join(c for c in text if c.isspace() or unicodedata.category(c) != "Cc" and c != "\ufeff").split()
    assert normal.split() == [unicodedata.normalize("NFC", word) for word in words]


@pytest.mark.parametrize("text, normal", [
    ("a\r\nb\rc\x0cd\u2028e\x1ff", "a\nb\nc\nd\ne\nf"),
    ("  if x:  \n\treturn\t\n\n\n", "  if x:\n\treturn"),
    ("\n\none\n\n\ntwo", "one\n\n\ntwo"),
    ("\ufeffcafe\u0301\x00", "caf\u00e9"),
])
def test_examples(text, normal):
    """Indentation and empty lines between paragraphs stay."""
    assert normalize(text) == normal
