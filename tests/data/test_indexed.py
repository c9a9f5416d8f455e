"""Megatron's .bin/.idx pair: what is written is read, and nothing less is accepted."""
import struct
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.data import indexed
from mpi_impl.data.indexed import HEADER, TOKEN_TYPES, IndexedDataset, blocks, fingerprint, write_indexed
from reference.errors import UserError

VOCAB_SIZES = st.sampled_from([2, 256, 65_499, 65_500, 2**31 - 1])


@st.composite
def ragged_documents(draw):
    """Draw a vocabulary size, and documents over it: one array or a list of them, some empty, but not all."""
    vocab_size = draw(VOCAB_SIZES)
    dtype = draw(st.sampled_from([d for d in (np.uint16, np.int32, np.int64) if np.iinfo(d).max >= vocab_size - 1]))
    sequence = st.lists(st.integers(0, vocab_size - 1), max_size=9).map(lambda tokens: np.array(tokens, dtype))
    documents = st.lists(sequence | st.lists(sequence, max_size=4), min_size=1, max_size=6)
    return vocab_size, draw(documents.filter(lambda documents: any(map(len, sentences(documents)))))


def sentences(documents):
    """Return all sequences of the documents."""
    return [one for document in documents for one in ([document] if isinstance(document, np.ndarray) else document)]


@given(ragged_documents())
def test_write_then_read_is_the_identity(case):
    """Every sequence of every document comes back, alone and in the flat stream, in Megatron's type: its bound is
    65,500, not 65,536.
    """
    vocab_size, documents = case
    with tempfile.TemporaryDirectory() as folder:
        write_indexed(f"{folder}/x", iter(documents), vocab_size)
        dataset = IndexedDataset(f"{folder}/x")
        assert dataset.tokens.dtype == (np.uint16 if vocab_size < 65_500 else np.int32)
        assert [list(sequence) for sequence in dataset] == [list(sequence) for sequence in sentences(documents)]
        assert dataset.tokens.tolist() == np.concatenate(sentences(documents)).tolist()
        counts = [1 if isinstance(document, np.ndarray) else len(document) for document in documents]
        assert dataset.document_indices.tolist() == [sum(counts[:k]) for k in range(len(documents) + 1)]
        assert sorted(path.name for path in Path(folder).iterdir()) == ["x.bin", "x.idx"]


def test_the_bytes_are_megatrons(tmp_path):
    """The files of two documents, the second in two sentences, spelled out from the description of the format."""
    write_indexed(tmp_path / "x", [np.array([7, 8, 9]), [np.array([1]), np.array([2, 3])]], 100)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<6H", 7, 8, 9, 1, 2, 3)
    assert (tmp_path / "x.idx").read_bytes() == (
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3) + struct.pack("<3i3q3q", 3, 1, 2, 0, 6, 8, 0, 1, 3)
    )


def write_by_hand(
    folder, tokens, lengths=None, pointers=None, documents=None, magic=b"MMIDIDX\x00\x00", version=1, code=8
):
    """Write a pair with anything in it; by default, one document of all tokens."""
    lengths = [len(tokens)] if lengths is None else lengths
    itemsize = TOKEN_TYPES[code].itemsize if code in TOKEN_TYPES else 4
    pointers = list(itemsize * (np.cumsum(lengths) - lengths)) if pointers is None else pointers
    documents = [0, len(lengths)] if documents is None else documents
    n, d = len(lengths), len(documents)
    header = struct.pack("<9sQBQQ", magic, version, code, n, d)
    (folder / "x.idx").write_bytes(header + struct.pack(f"<{n}i{n}q{d}q", *lengths, *pointers, *documents))
    (folder / "x.bin").write_bytes(np.array(tokens, TOKEN_TYPES.get(code, np.float32)).tobytes())
    return folder / "x"


@pytest.mark.parametrize("code", TOKEN_TYPES)
def test_every_integer_type_of_the_format_is_read(tmp_path, code):
    """Megatron has six integer types; a document may have several sequences."""
    dataset = IndexedDataset(write_by_hand(tmp_path, [5, 6, 7, 8], lengths=[1, 2, 1], documents=[0, 2, 3], code=code))
    assert [list(sequence) for sequence in dataset] == [[5], [6, 7], [8]]
    assert dataset.document_indices.tolist() == [0, 2, 3]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_cut_at_any_byte_or_one_too_long_is_refused(tmp_path, suffix):
    """Sizes are compared before anything is used."""
    write_indexed(tmp_path / "x", [np.arange(5), np.arange(0), np.arange(3)], 100)
    path = tmp_path / f"x{suffix}"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=rf"x\{suffix} is truncated"):
            IndexedDataset(tmp_path / "x")
    path.write_bytes(whole + b"\x00")
    with pytest.raises(UserError, match=rf"x\{suffix} is too long"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("fault, said", [
    ({"magic": b"MMIDIDY\x00\x00"}, "not a Megatron index"), ({"version": 2}, "version 2"), ({"code": 7}, "type 7"),
    ({"tokens": []}, "lists no tokens"), ({"lengths": [5, -1]}, "damaged"), ({"documents": []}, "damaged"),
    ({"documents": [1, 1]}, "damaged"), ({"lengths": [2, 2], "documents": [0, 2, 1, 2]}, "damaged")])
def test_a_foreign_or_damaged_index_is_refused(tmp_path, fault, said):
    with pytest.raises(UserError, match=said):
        IndexedDataset(write_by_hand(tmp_path, **({"tokens": [1, 2, 3, 4]} | fault)))


@given(ragged_documents(), st.integers(1, 3))
def test_an_index_is_looked_at_block_by_block(case, size):
    """A sound one is sound in blocks of any size; and where a sequence begins elsewhere, that is found in any block."""
    vocab_size, documents = case
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed, "blocks", partial(blocks, size=size))
        write_indexed(f"{folder}/x", iter(documents), vocab_size)
        n = len(IndexedDataset(f"{folder}/x"))
        index, content = Path(folder, "x.idx"), Path(folder, "x.idx").read_bytes()
        for place in range(HEADER.size + 4 * n, HEADER.size + 12 * n, 8):
            index.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1:])
            with pytest.raises(UserError, match="do not lie end to end"):
                IndexedDataset(f"{folder}/x")


def test_a_fingerprint_is_that_of_the_index_and_the_tokens(tmp_path):
    """The same data have the same one, wherever they are; other documents, and a single other token, have another."""
    one, two = np.arange(3 << 20) % 97, np.array([1, 2, 4])
    contents = {"same": [one, two], "tokens": [one, two + 1], "documents": [[one, two]], "again": [one, two]}
    for name, documents in contents.items():
        write_indexed(tmp_path / name, documents, 100)
    same, tokens, documents, again = (fingerprint(tmp_path / name) for name in contents)
    assert same == again and len({same, tokens, documents}) == 3


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_outside_the_vocabulary_is_not_written(tmp_path, token):
    """It would wrap around in a two-byte type; and a failed write leaves no file."""
    with pytest.raises(UserError, match=f"Document 1 holds the token {token}, outside the vocabulary of 100"):
        write_indexed(tmp_path / "x", [np.array([1]), np.array([2, token])], 100)
    assert not list(tmp_path.iterdir())


def test_an_old_index_is_never_found_beside_new_tokens(tmp_path, monkeypatch):
    """A pair is replaced as a whole; interrupted between its two files, it cannot be opened."""
    write_indexed(tmp_path / "x", [np.array([1, 2])], 100)
    write_indexed(tmp_path / "x", [np.array([3, 4])], 100)
    assert IndexedDataset(tmp_path / "x").tokens.tolist() == [3, 4]

    def replace_tokens_only(source, target):
        if Path(target).suffix == ".idx":
            raise KeyboardInterrupt
        Path(source).rename(target)

    monkeypatch.setattr("os.replace", replace_tokens_only)
    with pytest.raises(KeyboardInterrupt):
        write_indexed(tmp_path / "x", [np.array([5]), np.array([6])], 100)
    with pytest.raises(UserError, match=r"x\.idx is missing"):
        IndexedDataset(tmp_path / "x")


def test_documents_are_written_as_they_come(tmp_path):
    """Only one document is in memory: each may be forgotten when the next is asked for."""

    def one_buffer():
        buffer = np.zeros(3, np.int64)
        for i in range(4):
            buffer[:] = i
            yield buffer

    write_indexed(tmp_path / "x", one_buffer(), 100)
    assert [list(document) for document in IndexedDataset(tmp_path / "x")] == [[i] * 3 for i in range(4)]
