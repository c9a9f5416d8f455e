"""Encoding of a corpus: the division of the text into pieces does not show in the tokens."""
import pytest
from hypothesis import given, strategies as st

from mpi_impl.data import encode
from mpi_impl.data.sentences import split_sentences
from mpi_impl.data.tokenizer import BertWordPieceCase, ByteLevelBPETokenizer, NullTokenizer

TEXT = st.text("ab \n\t,'s1é中\x1c\x85", min_size=1, max_size=40)
TOKENIZER = ByteLevelBPETokenizer.train(["a b  ab \n\n  a, b's\t ab" * 9], 300)


@given(st.lists(TEXT, max_size=6), st.integers(1, 12))
def test_tokens_do_not_depend_on_the_pieces(texts, piece):
    """Documents encoded together or in pieces have the tokens they have alone, and end as documents do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "PIECE", piece)
        documents = [document.tolist() for document in encode.encode_documents(texts, TOKENIZER)]
    assert documents == [[*TOKENIZER.encode(text), TOKENIZER.eod] for text in texts]


@pytest.mark.parametrize("piece", range(1, 8))
def test_a_piece_begins_with_a_blank(monkeypatch, piece):
    """A blank belongs to the word after it, as ' ab' is one token: without it, it would be a token of its own."""
    text = "ab ab\n\nab ab  ab " * 3
    monkeypatch.setattr(encode, "PIECE", piece)
    pieces = [piece for piece, _ in encode.split_into_pieces([text])]
    assert len(pieces) > 2 and "".join(pieces) == text
    assert all(piece[0].isspace() for piece in pieces[1:]) and not any(piece[-1].isspace() for piece in pieces[:-1])


@given(st.lists(st.text("ab .\n!A", max_size=40), max_size=4))
def test_sentences_are_encoded_alone(texts):
    """Each document as its sentences, without an end of the document."""
    documents = list(encode.encode_sentences(texts, TOKENIZER))
    assert [[sentence.tolist() for sentence in document] for document in documents] == [
        [TOKENIZER.encode(sentence) for sentence in split_sentences(text)] for text in texts]


def test_a_sentence_without_tokens_is_none():
    """Here a character that WordPiece leaves out, in a paragraph of its own."""
    tokenizer = BertWordPieceCase.train(["One. Two. Three."] * 9, 100)
    (document,) = encode.encode_sentences(["One.\n\n\u200b\n\nTwo."], tokenizer)
    assert [tokenizer.decode(sentence) for sentence in document] == ["One.", "Two."]


def test_no_number_is_divided():
    """Ready-made ids on one long line stay what they are."""
    ids = list(range(1000)) * 500
    (document,) = encode.encode_documents([" ".join(map(str, ids))], NullTokenizer(1000))
    assert document.tolist() == [*ids, 1000]


def test_progress_changes_no_text_and_is_reported_after_each_pause(monkeypatch):
    """With no time between reports there is one for each text."""
    monkeypatch.setattr(encode, "REPORT_EVERY", -1)
    said = []
    assert list(encode.report_progress(["a", "bc"], "read", said.append)) == ["a", "bc"]
    assert said == ["read 1 document, 0.0 million characters", "read 2 documents, 0.0 million characters"]
