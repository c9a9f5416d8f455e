"""A tokenizer that is saved beside a model is the same when it is loaded."""
import json

import pytest

from mpi_impl.data.huggingface_tokenizer import HuggingFaceTokenizer
from mpi_impl.data.saved_tokenizer import SAVED, is_saved, load, save
from mpi_impl.data.tokenizer import (END_OF_DOCUMENT, BertWordPieceCase, BertWordPieceLowerCase, ByteLevelBPETokenizer,
                                     GPT2BPETokenizer, NullTokenizer)
from mpi_impl.data.tokenizer_choice import TokenizerChoice, given_tokenizer

TEXT = "The cat sat on the mat, and the dog sat on the cat. "


def gpt2(folder):
    ByteLevelBPETokenizer.train([TEXT * 20], 280).library.model.save(str(folder))
    return GPT2BPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))


def a_models(library, vocab_size, end_of_document=END_OF_DOCUMENT):
    """Return a tokenizer of the library as the one of a model, whose table has `vocab_size` rows."""
    return HuggingFaceTokenizer(json.loads(library.to_str()), {
        "end_of_document": end_of_document, "vocab_size": vocab_size})


TOKENIZERS = {
    "bytes": lambda _: ByteLevelBPETokenizer.train([TEXT * 20], 280), "gpt2": gpt2, "null": lambda _: NullTokenizer(17),
    "cased": lambda _: BertWordPieceCase.train([TEXT * 20], 110),
    "a model's": lambda _: a_models(ByteLevelBPETokenizer.train([TEXT * 20], 280).library, 300, "the"),
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
    if type(again) is ByteLevelBPETokenizer:
        choice = TokenizerChoice(tokenizer_type=again.name, tokenizer_model=str(tmp_path / SAVED))
        assert given_tokenizer(choice).fingerprint == one.fingerprint, "it is what the option reads"
