"""Encoding of a corpus: the division of the text into pieces does not show in the tokens."""
import pytest
from hypothesis import given, strategies as st

from mpi_impl.data import encode
from mpi_impl.data.sentences import split_sentences
from mpi_impl.data.tokenizer import BertWordPieceCase, ByteLevelBPETokenizer

TEXT = st.text("ab \n\t,'s1é中\x1c\x85", min_size=1, max_size=40)
TOKENIZER = ByteLevelBPETokenizer.train(["a b  ab \n\n  a, b's\t ab" * 9], 300)


@given(st.lists(TEXT, max_size=6), st.integers(1, 12))
def test_tokens_do_not_depend_on_the_pieces(texts, piece):
    """Documents encoded together or in pieces have the tokens they have alone, and end as documents do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "PIECE", piece)
        documents = [document.tolist() for document in encode.encode_documents(texts, TOKENIZER)]
    assert documents == [[*TOKENIZER.encode(text), TOKENIZER.eod] for text in texts]


def test_a_long_text_has_several_pieces(monkeypatch):
    monkeypatch.setattr(encode, "PIECE", 7)
    assert len(list(encode.split_into_pieces(["ab ab\n\nab ab  ab " * 3]))) > 2


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
