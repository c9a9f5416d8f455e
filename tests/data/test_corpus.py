"""Sources of texts: files, folders, JSON lines, the standard library."""
import json
import os
import re
import tempfile
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mpi_impl.data import corpus
from mpi_impl.data.corpus import Corpus
from reference.errors import UserError


def texts(path):
    return list(Corpus(str(path)).documents())


@given(st.lists(st.text(min_size=1), min_size=1))
def test_documents_are_read_unchanged(documents):
    """Carriage returns included, in every form and under every name that its tools give it, with a byte-order mark and
    without: a text file, JSON lines with blank lines between, a JSON array, a JSON object on several lines.
    """
    plain, objects = documents[0].replace("\x00", " ").lstrip("\ufeff"), [{"id": 3, "text": text} for text in documents]
    lines = "\n \n".join(map(json.dumps, objects))
    with tempfile.TemporaryDirectory() as folder:
        for form, names, expected in (
            (plain, ["a.txt", "a"], [plain] if plain else None),
            (lines, ["a.jsonl", "wiki_00", "a.json", "a.txt"], documents),
            (json.dumps(objects, indent=1), ["a.json", "a"], documents),
            (json.dumps(objects[0], indent=1), ["a.json", "a"], documents[:1]),
        ):
            for name, encoding in product(names if expected else [], ["utf-8", "utf-8-sig"]):
                Path(folder, name).write_bytes(form.encode(encoding))
                assert texts(Path(folder, name)) == texts(folder) == expected
                Path(folder, name).unlink()


ARTICLES = '''<doc id="12" url="https://en.wikipedia.org/wiki?curid=12" title="Anarchism">
Anarchism

Anarchism is a &lt;political&gt; philosophy.

</doc>
<doc id="39" url="https://en.wikipedia.org/wiki?curid=39" title="Albedo">
Albedo

</doc>
'''


def test_articles_of_wikiextractor_are_documents(tmp_path):
    """Each begins with its title. A file that only begins so is not one of them, and is refused."""
    (tmp_path / "wiki_00").write_text(ARTICLES)
    assert texts(tmp_path) == ["Anarchism\n\nAnarchism is a &lt;political&gt; philosophy.", "Albedo"]
    (tmp_path / "wiki_00").write_text(f"{ARTICLES}and more")
    with pytest.raises(UserError, match="does not go on so"):
        texts(tmp_path)


@pytest.mark.parametrize("name, content", [
    ("a.json", b"[]"), ("a.json", b'["text"]'), ("a.json", b"words"), ("a", b'{"content": "1"}\n{"content": "2"}'),
    ("a.txt", b'[{"content": "1"}]'), ("a", b'{"text": "1"} and {'), ("a.txt", "words".encode("utf-16"))])
def test_what_is_not_a_document_is_not_learnt_as_it_is_spelled(tmp_path, name, content):
    """JSON without texts, and text that is not UTF-8: in a folder it is skipped. Alone it is refused."""
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.txt").write_text("[1] words {}")
    assert texts(tmp_path) == ["[1] words {}"]


def test_a_folder_is_its_text_files_in_order(tmp_path):
    """Sorted and recursive; binary and undecodable files are listed as skipped, hidden and empty ones are nothing."""
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, data in {
        "b/one.txt": b"1", "a.txt": b"2", "c.jsonl": b'{"text": "3"}\n{"text": "4"}\n', "c.json": b"{}", "d.txt": b"",
        "zero": b"a\x00b", "latin.txt": b"\xe9", ".git/config": b"5", ".hidden": b"6",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
    corpus = Corpus(str(tmp_path))
    for _ in range(2):  # a second pass is the same
        assert list(corpus.documents()) == ["2", "1", "3", "4"]
        assert [file.name for file in corpus.skipped] == ["c.json", "latin.txt", "zero"]


def test_the_default_is_the_standard_library():
    """Its source is there on every machine, and neither its tests nor installed packages are part of it."""
    corpus = Corpus(None)
    assert {"json", "dataclasses.py"} <= {name for file in corpus.files for name in file.parts[-2:]}
    assert not [file for file in corpus.files if {"site-packages", "test", "tests"} & set(file.parts[-3:])]
    assert any("def dataclass(" in text for text in corpus.documents())


def test_the_end_of_the_default_is_like_the_rest():
    """The end becomes validation data. Programs are there, not tables: functions are as frequent, up to a quarter."""
    texts = list(Corpus(None).documents())
    end = texts[-len(texts) // 10:]
    functions, lines = ([sum(len(re.findall(pattern, text, re.M)) for text in part) for part in (texts, end)]
                        for pattern in (r"^ *def ", r"$"))
    assert functions[1] / lines[1] == pytest.approx(functions[0] / lines[0], rel=0.25)
    assert not [text for text in texts if "decoding_table = (" in text]


def test_a_line_that_is_nested_too_deeply_is_named_by_its_number(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"text": "good"}\n\n' + "[" * 200_000)
    with pytest.raises(UserError, match=r"a\.json, line 3,"):
        texts(file)


@contextmanager
def without_privileges():
    """Run the block as a user whom permissions bind, though the tests may run as the superuser."""
    superuser = os.geteuid() == 0
    if superuser:
        os.seteuid(65534)
    try:
        yield
    finally:
        if superuser:
            os.seteuid(0)


def test_a_link_to_nowhere_or_to_itself_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "b.txt").symlink_to("nowhere")
    (tmp_path / "c.txt").symlink_to("c.txt")
    assert texts(tmp_path) == ["1"]


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
def test_a_folder_that_cannot_be_read_is_refused(mode):
    """On the way to a file, or below the folder that was given: never quietly left out."""
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        closed = Path(root, "closed")
        closed.mkdir()
        (closed / "b.txt").write_text("2")
        (closed / "b.txt").chmod(0o644)        # whatever the umask is
        Path(root, "a.txt").write_text("1")
        closed.chmod(mode)
        with without_privileges():
            with pytest.raises(UserError, match="closed.* cannot be read"):
                Corpus(root)
            if mode == 0o111:  # it may be entered, but not listed
                assert texts(closed / "b.txt") == ["2"]
            else:
                with pytest.raises(UserError, match="--data-path .*closed/b.txt cannot be looked up"):
                    Corpus(str(closed / "b.txt"))
        closed.chmod(0o755)


@pytest.mark.parametrize("name, says", [
    ("a.txt", "a.txt has 20,000,000,000 bytes, but"), ("a.jsonl", "a.jsonl, line 1, is longer than 1 MiB")])
def test_no_document_fills_the_memory(tmp_path, monkeypatch, name, says):
    """A file that is one hole: a document of it would be read into memory whole."""
    monkeypatch.setattr(corpus, "LARGEST", 1 << 20)
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 20 * 10**9)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=says):
            texts(path)
