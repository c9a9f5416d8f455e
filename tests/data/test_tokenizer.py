"""Tokenizers: text comes back unchanged, and options that do not fit are refused."""
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_impl.data.tokenizer import (
    END_OF_DOCUMENT,
    ByteLevelBPETokenizer,
    GPT2BPETokenizer,
    NullTokenizer,
    given_tokenizer,
)
from reference.errors import UserError

TEXTS = ["the quick brown fox jumps over the lazy dog", "def f(x):\n    return x\n" * 9, "übergroße Größe"]
UNICODE = st.text() | st.just(f"a{END_OF_DOCUMENT}b") | st.text("aé \n\t\r中🙂\x00\x85")


@pytest.fixture(scope="module")
def trained():
    return ByteLevelBPETokenizer.train(TEXTS, 300)


@pytest.fixture(scope="module")
def gpt2_files(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    trained.bpe.model.save(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


@given(st.lists(UNICODE))
def test_any_text_comes_back_unchanged(trained, gpt2_files, texts):
    """Alone or in a batch, by either tokenizer; and no text, whatever it says, ends a document."""
    for tokenizer in trained, GPT2BPETokenizer(*gpt2_files):
        ids = tokenizer.encode_batch(texts)
        assert [tokenizer.decode(i) for i in ids] == texts
        assert ids == [tokenizer.encode(text) for text in texts]
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eod for document in ids for i in document)


def test_the_end_of_a_document_is_one_token_that_can_be_read(trained, gpt2_files):
    """Decoding shows it by its name."""
    for tokenizer in trained, GPT2BPETokenizer(*gpt2_files):
        assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod]) == "a" + END_OF_DOCUMENT


def test_training_is_deterministic_and_saving_keeps_everything(trained, tmp_path):
    """The same texts give the same file, byte for byte."""
    trained.save(tmp_path / "a.json")
    ByteLevelBPETokenizer.train(iter(TEXTS), 300).save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    loaded = ByteLevelBPETokenizer.load(tmp_path / "a.json")
    assert (loaded.vocab_size, loaded.eod) == (trained.vocab_size, trained.eod)
    assert loaded.encode(TEXTS[0]) == trained.encode(TEXTS[0])


def test_the_vocabulary_is_what_was_asked_for_or_what_the_corpus_supports(trained):
    """300 tokens can be had from these texts; from 'ab' only the bytes, the end of a document and one merge."""
    assert trained.vocab_size == 300
    assert ByteLevelBPETokenizer.train(["ab"], 300).vocab_size == 258
    assert ByteLevelBPETokenizer.train(["ab"], 257).vocab_size == 257
    with pytest.raises(UserError, match="--vocab-size 256 is too small"):
        ByteLevelBPETokenizer.train(["ab"], 256)
    for size in 1_000_001, 10**23:
        with pytest.raises(UserError, match=f"--vocab-size {size} is too large"):
            ByteLevelBPETokenizer.train(["ab"], size)


@given(st.integers(1, 100), st.data())
def test_null_tokenizer_takes_ids_as_they_are(n, data):
    """Decoding prints the numbers, encoding reads them; n itself ends a document."""
    tokenizer = NullTokenizer(n)
    ids = data.draw(st.lists(st.integers(0, n)))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert (tokenizer.vocab_size, tokenizer.eod) == (n + 1, n)


@pytest.mark.parametrize("text", ["11", "-1", "x", "1.0"])
def test_null_tokenizer_refuses_what_is_no_id(text):
    """A number too large, a negative one, a word."""
    with pytest.raises(UserError, match="from 0 to 10"):
        NullTokenizer(10).encode(f"1 {text} 2")


def test_gpt2_files_are_checked(gpt2_files, tmp_path):
    """Either missing, either foreign, a vocabulary without all bytes or without the end of a document."""
    vocab, merges = gpt2_files
    bad = str(tmp_path / "bad")
    for args, option in ((bad, merges), "--vocab-file"), ((vocab, bad), "--merge-file"):
        with pytest.raises(UserError, match=f"{option} .*bad does not exist"):
            GPT2BPETokenizer(*args)
    with pytest.raises(UserError, match=r"--vocab-file .* cannot be looked up \(File name too long\)"):
        GPT2BPETokenizer("v" * 300, merges)
    for content in "no JSON", '{"a": 0}':
        (tmp_path / "bad").write_text(content)
        with pytest.raises(UserError, match="bad"):
            GPT2BPETokenizer(bad, merges)
    (tmp_path / "bad").write_text("one two three\n")
    with pytest.raises(UserError, match="are not GPT-2's"):
        GPT2BPETokenizer(vocab, bad)
    (tmp_path / "bad").write_text(Path(vocab).read_text("utf-8").replace(END_OF_DOCUMENT, "other"), "utf-8")
    with pytest.raises(UserError, match=re.escape("lacks '<|endoftext|>'")):
        GPT2BPETokenizer(bad, merges)


def test_a_foreign_tokenizer_file_is_refused(tmp_path):
    """Missing, not JSON, and JSON of something else."""
    for content in None, "no JSON", "{}":
        if content:
            (tmp_path / "t.json").write_text(content)
        with pytest.raises(UserError, match=r"t\.json is not a tokenizer"):
            ByteLevelBPETokenizer.load(tmp_path / "t.json")


def test_options_choose_the_tokenizer(gpt2_files):
    """Ours is yet to be trained; the others are determined."""
    assert given_tokenizer("ByteLevelBPETokenizer", 300, None, None) is None
    assert isinstance(given_tokenizer("NullTokenizer", 10, None, None), NullTokenizer)
    assert given_tokenizer("GPT2BPETokenizer", None, *gpt2_files).vocab_size == 300
    assert given_tokenizer("GPT2BPETokenizer", 300, *gpt2_files).vocab_size == 300


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("WordPiece", None, None, None), "--tokenizer-type WordPiece is unknown"),
        (("NullTokenizer", None, None, None), "needs --vocab-size"),
        (("NullTokenizer", 0, None, None), "--vocab-size 0 leaves no token"),
        (("NullTokenizer", 2**31, None, None), "--vocab-size 2147483648 is too large"),
        (("NullTokenizer", 5, "VOCAB", None), "--vocab-file is for"),
        (("ByteLevelBPETokenizer", None, None, "MERGES"), "--merge-file is for"),
        (("GPT2BPETokenizer", None, "VOCAB", None), "needs both"),
        (("GPT2BPETokenizer", None, None, "MERGES"), "needs both"),
        (("GPT2BPETokenizer", 4096, "VOCAB", "MERGES"), "--vocab-size 4096 contradicts"),
    ],
)
def test_options_that_do_not_fit_are_refused(gpt2_files, options, sentence):
    """Nothing that is given is ignored."""
    files = dict(zip(("VOCAB", "MERGES"), gpt2_files, strict=True))
    with pytest.raises(UserError, match=sentence):
        given_tokenizer(*(files.get(option, option) for option in options))


def test_other_tokenizers_have_other_fingerprints():
    """And the same one, trained again, has the same."""
    texts = ["one text and another", "another text"]
    one, again, other = (ByteLevelBPETokenizer.train(some, 260) for some in (texts, texts, ["quite other words"] * 3))
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert NullTokenizer(5).fingerprint == NullTokenizer(5).fingerprint != NullTokenizer(6).fingerprint
