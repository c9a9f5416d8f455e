"""Tokenizers: text comes back unchanged, and options that do not fit are refused."""
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mpi_impl.data import saved_tokenizer
from mpi_impl.data.huggingface_tokenizer import HuggingFaceTokenizer
from mpi_impl.data.saved_tokenizer import SAVED
from mpi_impl.data.tokenizer import (END_OF_DOCUMENT, SPECIAL, BertWordPieceCase, BertWordPieceLowerCase,
                                     ByteLevelBPETokenizer, GPT2BPETokenizer, NullTokenizer)
from mpi_impl.data.tokenizer_choice import TRAINED, TokenizerChoice, given_tokenizer
from reference.errors import UserError

TEXTS = ["the quick brown fox jumps over the lazy dog", "def f(x):\n    return x\n" * 9, "übergroße Größe"]
UNICODE = st.text() | st.just(f"a{END_OF_DOCUMENT}b") | st.text("aé \n\t\r中🙂\x00\x85")


def choose_tokenizer(tokenizer_type, vocab_size=None, vocab_file=None, merge_file=None, tokenizer_model=None):
    """Return the tokenizer that these options determine, or None."""
    return given_tokenizer(TokenizerChoice(tokenizer_type=tokenizer_type, vocab_size=vocab_size, vocab_file=vocab_file,
                                           merge_file=merge_file, tokenizer_model=tokenizer_model))


@pytest.fixture(scope="module")
def trained_tokenizer():
    return ByteLevelBPETokenizer.train(TEXTS, 300)


@pytest.fixture(scope="module")
def pieces():
    """Return the two WordPiece tokenizers, by name."""
    return {name: TRAINED[name].train([*TEXTS, "Größe"], 200)
            for name in ("BertWordPieceLowerCase", "BertWordPieceCase")}


@pytest.fixture(scope="module")
def vocab_txt(pieces, tmp_path_factory):
    """Write a file like BERT's vocab.txt: the special tokens, whole words, and pieces of words."""
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, "un", "##aff", "##able", "hello", ",", "Hello"]) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def gpt2_files(trained_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    trained_tokenizer.library.model.save(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


@given(st.lists(UNICODE))
def test_any_text_comes_back_unchanged(trained_tokenizer, gpt2_files, texts):
    """Alone or in a batch, by either tokenizer; and no text, whatever it says, ends a document."""
    for tokenizer in trained_tokenizer, GPT2BPETokenizer(*gpt2_files):
        ids = tokenizer.encode_batch(texts)
        assert [tokenizer.decode(i) for i in ids] == texts
        assert ids == [tokenizer.encode(text) for text in texts]
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eod for document in ids for i in document)


def test_the_end_of_a_document_is_one_token_that_can_be_read(trained_tokenizer, gpt2_files):
    """Decoding shows it by its name."""
    for tokenizer in trained_tokenizer, GPT2BPETokenizer(*gpt2_files):
        assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eod]) == "a" + END_OF_DOCUMENT


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_deterministic_and_saving_keeps_everything(name, tmp_path):
    """The same texts give the same file, byte for byte; other texts give another fingerprint."""
    one, again, other = (TRAINED[name].train(iter(some), 300) for some in (TEXTS, TEXTS, TEXTS[1:]))
    one.save(tmp_path / "a.json")
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    loaded = TRAINED[name].load(tmp_path / "a.json")
    assert (loaded.vocab_size, loaded.eod, loaded.fingerprint) == (one.vocab_size, one.eod, one.fingerprint)
    assert loaded.encode(TEXTS[0]) == one.encode(TEXTS[0])
    assert loaded.fingerprint != other.fingerprint


def test_training_wordpiece_gives_the_same_result_in_every_process():
    """The library counts in hash tables, whose order is another in each process; and on any number of cores."""
    program = ("import sys; from mpi_impl.data.tokenizer import BertWordPieceCase as T; "
               "print(T.train([open(sys.argv[1], encoding='utf-8').read()], 400).fingerprint)")
    prints = {subprocess.run([sys.executable, "-c", program, __file__], capture_output=True, text=True, check=True,
                             env=os.environ | {"RAYON_NUM_THREADS": cores}).stdout for cores in ("1", "2")}
    assert prints == {BertWordPieceCase.train([Path(__file__).read_text("utf-8")], 400).fingerprint + "\n"}


@given(st.lists(UNICODE | st.sampled_from(["[MASK]", "a [SEP] b", "##a"])))
def test_no_text_is_a_special_token(pieces, texts):
    """Whatever it says, apart from [UNK]; alone or in a batch; and how words are set apart does not matter."""
    for tokenizer in pieces.values():
        special = {tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask}
        ids = tokenizer.encode_batch(texts)
        assert ids == [tokenizer.encode(text) for text in texts]
        assert not special & {i for document in ids for i in document}
        assert tokenizer.encode_batch([f"\t{text} ".replace(" ", " \n ") for text in texts]) == ids


@given(st.lists(st.text("abcdeghijklmnoprtu", min_size=1), min_size=1))
def test_words_of_known_letters_come_back_word_by_word(pieces, words):
    """Every letter can begin a word and go on with it, and `begins_word` tells which it does."""
    for tokenizer in pieces.values():
        ids = tokenizer.encode(" ".join(words))
        assert tokenizer.decode(ids) == " ".join(words)
        assert tokenizer.begins_word[ids].sum() == len(words)
        firsts = [tokenizer.encode(word)[0] for word in words]
        assert [i for i in ids if tokenizer.begins_word[i]] == firsts


def test_lower_case_or_as_it_is_written(pieces):
    """The one tells no capital letters and no accents; for the other they are other words."""
    lower, cased = pieces["BertWordPieceLowerCase"], pieces["BertWordPieceCase"]
    assert lower.encode("Größe") == lower.encode("größe") == lower.encode("GROßE")
    assert cased.encode("Größe") != cased.encode("größe")
    assert cased.decode(cased.encode("Größe")) == "Größe"


def test_a_wordpiece_vocabulary_is_at_most_what_was_asked_for():
    """Rare characters stay out of it: their words are unknown. Half of it at least is for more than characters."""
    texts = [Path(__file__).read_text("utf-8"), "".join(map(chr, range(0x4E00, 0x5200)))]
    tokenizer = BertWordPieceLowerCase.train(texts, 100)
    assert tokenizer.vocab_size == 100
    assert tokenizer.decode(tokenizer.encode("are \u5000 the")) == "are [UNK] the"
    assert BertWordPieceLowerCase.train(["ab"], 100).vocab_size == 5 + 2 * 2 + 1
    for size, fault in ((99, "too small"), (1_000_001, "too large")):
        with pytest.raises(UserError, match=f"--vocab-size {size} is {fault}"):
            BertWordPieceLowerCase.train(["ab"], size)


def test_berts_vocabulary_is_read(vocab_txt):
    """Ids are the numbers of the lines; the longest piece comes first; [SEP] ends a document."""
    tokenizer = BertWordPieceLowerCase.from_vocab_file(vocab_txt)
    assert tokenizer.encode("Hello, unaffable unknown") == [8, 9, 5, 6, 7, 1]
    assert tokenizer.begins_word.tolist() == [True] * 6 + [False] * 2 + [True] * 3
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.eod) == (0, 2, 3, 4, 3)
    assert BertWordPieceCase.from_vocab_file(vocab_txt).encode("Hello hello") == [10, 8]


@pytest.mark.parametrize("content", [None, "", "a\nb\n", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n"])
def test_a_foreign_vocabulary_is_refused(content, tmp_path):
    """Missing, empty, or without one of the special tokens."""
    if content is not None:
        (tmp_path / "v.txt").write_text(content)
    with pytest.raises(UserError, match=r"--vocab-file .*v\.txt (does not exist|is not a vocab.txt)"):
        BertWordPieceLowerCase.from_vocab_file(str(tmp_path / "v.txt"))


def test_the_vocabulary_is_what_was_asked_for_or_what_the_corpus_supports(trained_tokenizer):
    """300 tokens can be had from these texts; from 'ab' only the bytes, the end of a document and one merge."""
    assert trained_tokenizer.vocab_size == 300
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


@pytest.mark.parametrize("kept", [0, 1, 20, -1])
def test_all_tokens_of_gpt2s_vocabulary_are_bytes_or_merges(gpt2_files, tmp_path, kept):
    """With fewer merges, the same text would get other tokens."""
    vocab, merges = gpt2_files
    (tmp_path / "merges.txt").write_text("".join(Path(merges).read_text("utf-8").splitlines(True)[:kept]), "utf-8")
    with pytest.raises(UserError, match=f"--merge-file {tmp_path}/merges.txt does not fit --vocab-file {vocab}"):
        GPT2BPETokenizer(vocab, str(tmp_path / "merges.txt"))


def test_a_file_at_which_the_library_panics(trained_tokenizer, tmp_path):
    """It is written in Rust, and what it raises then is no Exception."""
    content = json.loads(trained_tokenizer.library.to_str())
    content["model"]["continuing_subword_prefix"] = 9999 * "x"
    (tmp_path / "t.json").write_text(json.dumps(content))
    for load in ByteLevelBPETokenizer.load, HuggingFaceTokenizer.load:
        with pytest.raises(UserError, match=r"t\.json is not a tokenizer.* out of range"):
            load(tmp_path / "t.json")


def test_a_foreign_tokenizer_file_is_refused(trained_tokenizer, pieces, tmp_path):
    """Missing, not JSON, JSON of something else, and another type's."""
    for name in TRAINED:
        (tmp_path / "t.json").unlink(missing_ok=True)
        with pytest.raises(UserError, match=r"t\.json cannot be read: No such file or directory"):
            TRAINED[name].load(tmp_path / "t.json")
        for content in "no JSON", "{}", "[" * 10**5, '{"model": ' * 10**5:
            (tmp_path / "t.json").write_text(content)
            with pytest.raises(UserError, match=rf"t\.json is not a tokenizer saved by this program as {name}"):
                TRAINED[name].load(tmp_path / "t.json")
        for other in [trained_tokenizer, *pieces.values()]:
            if other.name != name:
                other.save(tmp_path / "t.json")
                with pytest.raises(UserError, match=rf"t\.json is not a tokenizer saved by this program as {name}"):
                    TRAINED[name].load(tmp_path / "t.json")


def test_a_tokenizer_is_read_from_files_only(gpt2_files, vocab_txt, tmp_path, monkeypatch):
    """A pipe would never be opened, a device never end; and no tokenizer has as many bytes as a corpus."""
    vocab, merges = gpt2_files
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for odd in (str(tmp_path / "pipe"), str(tmp_path / "zero")):
        for choice in [("GPT2BPETokenizer", None, odd, merges), ("GPT2BPETokenizer", None, vocab, odd),
                      ("BertWordPieceCase", None, odd, None), ("ByteLevelBPETokenizer", None, None, None, odd)]:
            with pytest.raises(UserError, match="cannot be read: it is a pipe or a device"):
                choose_tokenizer(*choice)
        (tmp_path / SAVED).unlink(missing_ok=True)
        (tmp_path / SAVED).symlink_to(odd)
        with pytest.raises(UserError, match="it is a pipe or a device"):
            saved_tokenizer.load(str(tmp_path))
    monkeypatch.setattr("mpi_impl.data.tokenizer.LARGEST", 10)
    with pytest.raises(UserError, match="but a file of its kind has at most 10"):
        choose_tokenizer("BertWordPieceCase", None, vocab_txt, None)


def test_options_choose_the_tokenizer(trained_tokenizer, pieces, gpt2_files, vocab_txt, tmp_path):
    """Some are yet to be trained; the others are determined."""
    for name in TRAINED:
        assert choose_tokenizer(name, 300, None, None) is None
    assert isinstance(choose_tokenizer("NullTokenizer", 10, None, None), NullTokenizer)
    for size in None, 300:
        assert choose_tokenizer("GPT2BPETokenizer", size, *gpt2_files).vocab_size == 300
    for tokenizer in [trained_tokenizer, *pieces.values()]:
        tokenizer.save(tmp_path / "t.json")
        read = choose_tokenizer(tokenizer.name, tokenizer.vocab_size, None, None, str(tmp_path / "t.json"))
        assert (read.name, read.fingerprint) == (tokenizer.name, tokenizer.fingerprint)
    for name in pieces:
        read = choose_tokenizer(name, 11, vocab_txt, None)
        assert (read.name, read.vocab_size) == (name, 11)


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
        (("GPT2BPETokenizer", None, "VOCAB", "MERGES", "MODEL"), "--tokenizer-model is for --tokenizer-type ByteLevel"),
        (("NullTokenizer", 5, None, None, "MODEL"), "--tokenizer-model is for"),
        (("ByteLevelBPETokenizer", None, "VOCAB", None), "--vocab-file is for --tokenizer-type GPT2BPETokenizer or"),
        (("BertWordPieceCase", None, None, "MERGES"), "--merge-file is for --tokenizer-type GPT2BPETokenizer; Bert"),
        (("BertWordPieceCase", 99, None, None), "--vocab-size 99 is too small"),
        (("BertWordPieceCase", 4096, "VOCAB.TXT", None), "--vocab-size 4096 contradicts --vocab-file .* 11 tokens"),
        (("BertWordPieceCase", None, "VOCAB.TXT", None, "MODEL"), "Leave one of the two out"),
    ],
)
def test_options_that_do_not_fit_are_refused(gpt2_files, vocab_txt, options, sentence):
    """Nothing that is given is ignored."""
    files = dict(zip(("VOCAB", "MERGES", "VOCAB.TXT"), (*gpt2_files, vocab_txt), strict=True))
    with pytest.raises(UserError, match=sentence):
        choose_tokenizer(*(files.get(option, option) for option in options))


def test_other_tokenizers_have_other_fingerprints():
    """And the same one, trained again, has the same."""
    texts = ["one text and another", "another text"]
    one, again, other = (ByteLevelBPETokenizer.train(some, 260) for some in (texts, texts, ["quite other words"] * 3))
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert NullTokenizer(5).fingerprint == NullTokenizer(5).fingerprint != NullTokenizer(6).fingerprint


@pytest.mark.parametrize("kind", [ByteLevelBPETokenizer, BertWordPieceLowerCase])
def test_a_tokenizer_that_is_sent_to_another_rank_is_the_same(kind):
    """The name of a special token in a text is ordinary text there, too."""
    tokenizer = kind.train(TEXTS, 400)
    again = pickle.loads(pickle.dumps(tokenizer))
    text = "a <|endoftext|> b [SEP] c [MASK]"
    assert again.encode(text) == tokenizer.encode(text) and again.eod not in again.encode(text)
