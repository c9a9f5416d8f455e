"""A corpus in chunks: every document once and in order, wherever the chunks end."""
import json
import tempfile
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mpi_impl.data.prepare import chunks as chunks_module
from mpi_impl.data.prepare.chunks import chunks, documents, sources

TEXT = st.text("ab é\n", max_size=30)
BAD_LINE = st.sampled_from([b"", b"  ", b"{", b"\xff", b"[" * 99])
LINE = TEXT.map(lambda text: json.dumps({"text": text}).encode()) | BAD_LINE


def read(folder, size):
    """Return the chunks of a file or folder, and their documents: [(file, line, text, kind of fault)], lines counted
    through each file.
    """
    plan, seen = list(chunks(sources([str(folder)], "--input"), size)), []
    for file, parts in groupby((part for chunk in plan for part in chunk), lambda part: part.file):
        before = 0
        for part in parts:
            of_part = list(documents(part))
            seen += [(Path(file).name, line and before + line, text, bad and bad.kind) for line, text, bad in of_part]
            before += of_part[-1].line if of_part else 0
    return plan, seen


@given(st.lists(LINE, max_size=8), st.booleans(), st.integers(1, 60))
def test_each_line_is_in_one_chunk(lines, newline_at_end, size):
    """With its number: in chunks of any size it is what it is in one."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.jsonl")
        content = b"\n".join(lines) + b"\n" * newline_at_end
        file.write_bytes(content)
        (plan, seen), (_, whole) = read(file, size), read(file, 10**6)
        assert seen == whole
        assert [part.start for chunk in plan for part in chunk] == list(range(0, max(1, len(content)), size))
        last = content.count(b"\n") + (not content.endswith(b"\n"))
        assert [line for _, line, _, _ in whole] == (list(range(1, last + 1)) if content else [0])


def test_bad_documents_are_reported_and_the_others_are_read(tmp_path):
    """Bytes that are not text, lines that are not JSON, empty ones; each with its kind. A blank line is not a document.
    """
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "one"}\n\n{"text": "tw\xff"}\n{"text": 3}\n{"text": "\\ud800"}\n{"text": " "}\n7\n{"text": "six"}')
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "c.txt").write_bytes(b"a\x00b")
    (tmp_path / "d.txt").write_bytes(b"\xe9")
    (tmp_path / "e.txt").write_bytes(b"text")
    (tmp_path / "f.txt").write_bytes(b"\xef\xbb\xbf")
    assert [document for document in read(tmp_path, 20)[1] if document[2:] != ("", None)] == [
        ("a.jsonl", 1, "one", None), ("a.jsonl", 3, "", "bad bytes"), ("a.jsonl", 4, "", "bad JSON"),
        ("a.jsonl", 5, "", "bad JSON"), ("a.jsonl", 6, "", "empty"), ("a.jsonl", 7, "", "bad JSON"),
        ("a.jsonl", 8, "six", None), ("b.jsonl", 0, "", "empty"), ("c.txt", 0, "", "bad bytes"),
        ("d.txt", 0, "", "bad bytes"), ("e.txt", 0, "text", None), ("f.txt", 0, "", "empty")]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 99))
def test_what_is_too_long_is_never_held_in_memory(lengths, size):
    """The line is reported, and those after it are read as usual. Here 40 bytes are too long."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks_module, "LARGEST", 40)
        file = Path(folder, "a.jsonl")
        lines = [json.dumps({"text": "x" * length}) for length in lengths]
        file.write_text("\n".join(lines))
        expected = ["too long" if 12 + length >= 40 else None if length else "empty" for length in lengths]
        assert [bad for *_, bad in read(file, size)[1]] == expected
        for length, expected in ((40, ("x" * 40, None)), (41, ("", "too long"))):
            Path(folder, "a.txt").write_text("x" * length)
            (document,) = read(Path(folder, "a.txt"), size)[1]
            assert document[2:] == expected
