"""Encoding of a corpus: the division of the text into pieces does not show in the tokens."""
import json

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer as Library, models, normalizers, pre_tokenizers, trainers

from mpi_impl.data import encode
from mpi_impl.data.huggingface_tokenizer import HuggingFaceTokenizer
from mpi_impl.data.sentences import split_sentences
from mpi_impl.data.tokenizer import END_OF_DOCUMENT, BertWordPieceCase, BertWordPieceLowerCase, ByteLevelBPETokenizer

TEXT = st.text("ab \n\t,'s1é\u0301中\x1c\x85", min_size=1, max_size=40)
CORPUS = ["a b  ab \n\n  a, b's\t ab é1中" * 9]
TOKENIZER = ByteLevelBPETokenizer.train(CORPUS, 300)


def huggingface(pre_tokenizer, normalizer=None, added=None) -> HuggingFaceTokenizer:
    """Train a model's tokenizer that differs from GPT-2's."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizer
    if normalizer:
        library.normalizer = normalizer
    library.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=330, special_tokens=[END_OF_DOCUMENT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    library.add_tokens([AddedToken(added)] if added else [])
    return HuggingFaceTokenizer(json.loads(library.to_str()), {})


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
TOKENIZERS = [
    TOKENIZER, BertWordPieceCase.train(CORPUS, 100), BertWordPieceLowerCase.train(CORPUS, 100), huggingface(GPT2),
    huggingface(pre_tokenizers.ByteLevel(add_prefix_space=True)), huggingface(pre_tokenizers.Metaspace()),
    huggingface(pre_tokenizers.ByteLevel(use_regex=False)), huggingface(GPT2, normalizers.NFC()),
    huggingface(GPT2, normalizers.Strip()), huggingface(GPT2, added="b a")]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(texts=st.lists(TEXT, max_size=6), piece=st.integers(1, 12))
def test_tokens_do_not_depend_on_the_pieces(tokenizer, texts, piece):
    """Documents encoded together or in pieces have the tokens that they have alone, and end as documents do. It holds
    whatever the tokenizer does to a text first.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "PIECE", piece)
        documents = [document.tolist() for document in encode.encode_documents(texts, tokenizer)]
    assert documents == [[*tokenizer.encode(text), tokenizer.eod] for text in texts]


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
