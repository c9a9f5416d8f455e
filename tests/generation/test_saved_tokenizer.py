"""A tokenizer that is saved beside a model is the same when it is loaded."""
import json

import pytest

from mpi_impl.data.huggingface_tokenizer import HuggingFaceTokenizer
from mpi_impl.data.saved_tokenizer import SAVED, is_saved, load, save
from mpi_impl.data.tokenizer import (BertWordPieceCase, BertWordPieceLowerCase, ByteLevelBPETokenizer, GPT2BPETokenizer,
                                     NullTokenizer)
from mpi_impl.data.tokenizer_choice import TokenizerChoice, given_tokenizer
from reference.errors import UserError

TEXT = "The cat sat on the mat, and the dog sat on the cat. "


def gpt2(folder):
    ByteLevelBPETokenizer.train([TEXT * 20], 280).library.model.save(str(folder))
    return GPT2BPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


TOKENIZERS = {
    "bytes": lambda _: ByteLevelBPETokenizer.train([TEXT * 20], 280), "gpt2": gpt2, "null": lambda _: NullTokenizer(17),
    "cased": lambda _: BertWordPieceCase.train([TEXT * 20], 110),
    "a model's": lambda _: HuggingFaceTokenizer(
        ByteLevelBPETokenizer.train([TEXT * 20], 280).library, "the", 300),
    "lower": lambda _: BertWordPieceLowerCase.train([TEXT * 20], 110),
}


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_it_comes_back(tmp_path, make):
    one = make(tmp_path)
    assert not is_saved(str(tmp_path))
    save(one, str(tmp_path))
    again = load(str(tmp_path))
    assert is_saved(str(tmp_path)) and not list(tmp_path.glob("*.tmp"))
    assert (again.fingerprint, again.vocab_size, again.eod) == (one.fingerprint, one.vocab_size, one.eod)
    text = "3 4 17 3" if isinstance(one, NullTokenizer) else TEXT
    assert again.encode(text) == one.encode(text) and again.decode(one.encode(text)) == one.decode(one.encode(text))
    assert type(again) is (ByteLevelBPETokenizer if type(one) is GPT2BPETokenizer else type(one))
    save(again, str(tmp_path))
    assert load(str(tmp_path)).fingerprint == one.fingerprint


def test_it_is_what_the_option_reads(tmp_path):
    one = TOKENIZERS["bytes"](None)
    save(one, str(tmp_path))
    named = given_tokenizer(TokenizerChoice(tokenizer_type=one.name, tokenizer_model=str(tmp_path / SAVED)))
    assert named is not None and named.fingerprint == one.fingerprint


@pytest.mark.parametrize("content", [
    "", "{", "[]", "3", "{}", '{"model": {"type": "WordPiece"}}', '{"NullTokenizer": "many"}', '{"NullTokenizer": 0}',
    '{"HuggingFaceTokenizer": 3}',
    json.dumps({"model": {"type": "BPE", "vocab": 3}})], ids=repr)
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / SAVED).write_text(content)
    with pytest.raises(UserError):
        load(str(tmp_path))


@pytest.mark.parametrize("beside, sentence", [
    ({}, None), ({"tokenizer_config.json": {"eos_token": {"content": "a"}}, "config.json": {"vocab_size": 290}}, None),
    ({"tokenizer_config.json": {"eos_token": "absent"}}, "names the token that ends a document ('absent')"),
    ({"tokenizer_config.json": {"eos_token": None}}, "names the token that ends a document")])
def test_a_models_file(tmp_path, beside, sentence):
    """The files beside it say which token ends a document, and how many rows the model's table has."""
    library = TOKENIZERS["bytes"](None).library
    (tmp_path / SAVED).write_text(library.to_str())
    for name, content in beside.items():
        (tmp_path / name).write_text(json.dumps(content))
    choice = TokenizerChoice(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / SAVED))
    if sentence:
        with pytest.raises(UserError) as caught:
            given_tokenizer(choice)
        assert sentence in str(caught.value)
        return
    found, vocabulary = given_tokenizer(choice), library.get_vocab()
    assert found.eod == vocabulary["a" if beside else "<|endoftext|>"]
    assert found.vocab_size == (290 if beside else len(vocabulary))
    assert found.decode(found.encode(TEXT)) == TEXT


def test_a_models_tokenizer_needs_its_file():
    with pytest.raises(UserError, match="HuggingFaceTokenizer needs --tokenizer-model"):
        given_tokenizer(TokenizerChoice(tokenizer_type="HuggingFaceTokenizer"))


def test_no_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load(str(tmp_path))
    with pytest.raises(UserError, match="cannot be written"):
        save(NullTokenizer(3), str(tmp_path / "nowhere"))
