"""Tokenizers: text comes back unchanged, options choose them, and foreign files are refused."""
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mpi_impl.data.huggingface_tokenizer import HuggingFaceTokenizer
from mpi_impl.data.tokenizer import (END_OF_DOCUMENT, SPECIAL, BertWordPieceCase, BertWordPieceLowerCase,
                                     ByteLevelBPETokenizer, GPT2BPETokenizer, NullTokenizer)
from mpi_impl.data.tokenizer_choice import TRAINED, TokenizerChoice, given_tokenizer
from reference.errors import UserError

TEXTS = ["the quick brown fox jumps over the lazy dog", "def f(x):\n    return x\n" * 9, "übergroße Größe"]
UNICODE = st.text() | st.just(f"a{END_OF_DOCUMENT}b") | st.text("aé \n\t\r中🙂\x00\x85")


def choose_tokenizer(tokenizer_type, **options):
    """Return the tokenizer that these options determine, or None."""
    return given_tokenizer(TokenizerChoice(tokenizer_type=tokenizer_type, **options))


@pytest.fixture(scope="module")
def trained():
    """Return a tokenizer of each type that is trained, by name."""
    return {name: kind.train([*TEXTS, "Größe"], 300) for name, kind in TRAINED.items()}


@pytest.fixture(scope="module")
def byte_pairs(trained):
    return trained["ByteLevelBPETokenizer"]


@pytest.fixture(scope="module")
def pieces(trained):
    """Return the two WordPiece tokenizers."""
    return [trained["BertWordPieceLowerCase"], trained["BertWordPieceCase"]]


@pytest.fixture(scope="module")
def files(byte_pairs, tmp_path_factory):
    """Write GPT-2's two files, and one like BERT's vocab.txt: special tokens, whole words, and pieces of words."""
    folder = tmp_path_factory.mktemp("files")
    byte_pairs.library.model.save(str(folder))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, "un", "##aff", "##able", "hello", ",", "Hello"]) + "\n")
    return {name: str(folder / name) for name in ("vocab.json", "merges.txt", "vocab.txt")}


@pytest.fixture(scope="module")
def gpt2_files(files):
    return files["vocab.json"], files["merges.txt"]


@given(st.lists(UNICODE))
def test_any_text_comes_back_unchanged(byte_pairs, gpt2_files, texts):
    """Alone or in a batch, by either tokenizer; no text, whatever it says, ends a document, and the end can be read."""
    for tokenizer in byte_pairs, GPT2BPETokenizer(*gpt2_files):
        ids = tokenizer.encode_batch(texts)
        assert [tokenizer.decode([*i, tokenizer.eod]) for i in ids] == [text + END_OF_DOCUMENT for text in texts]
        assert ids == [tokenizer.encode(text) for text in texts]
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eod for document in ids for i in document)


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_deterministic_and_saving_keeps_everything(name, tmp_path):
    """Training on the same texts gives the same bytes; other texts give another fingerprint.

    The name of a special token inside a text is ordinary text, also in a tokenizer that was sent to another rank.
    """
    one, repeated, other = (TRAINED[name].train(iter(some), 300) for some in (TEXTS, TEXTS, TEXTS[1:]))
    one.save(tmp_path / "a.json")
    repeated.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert one.fingerprint != other.fingerprint
    text = "the a <|endoftext|> b [SEP] c [MASK]"
    for copy in TRAINED[name].load(tmp_path / "a.json"), pickle.loads(pickle.dumps(one)):
        assert (copy.vocab_size, copy.eod, copy.fingerprint) == (one.vocab_size, one.eod, one.fingerprint)
        assert copy.encode(text) == one.encode(text) and copy.eod not in copy.encode(text)


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
    for tokenizer in pieces:
        special = {tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask}
        ids = tokenizer.encode_batch(texts)
        assert ids == [tokenizer.encode(text) for text in texts]
        assert not special & {i for document in ids for i in document}
        assert tokenizer.encode_batch([f"\t{text} ".replace(" ", " \n ") for text in texts]) == ids


@given(st.lists(st.text("abcdeghijklmnoprtu", min_size=1), min_size=1))
def test_words_of_known_letters_come_back_word_by_word(pieces, words):
    """Every letter can begin a word and go on with it, and `begins_word` tells which it does."""
    for tokenizer in pieces:
        ids = tokenizer.encode(" ".join(words))
        assert tokenizer.decode(ids) == " ".join(words)
        firsts = [tokenizer.encode(word)[0] for word in words]
        assert [i for i in ids if tokenizer.begins_word[i]] == firsts


def test_lower_case_or_as_it_is_written(pieces):
    """The one does not distinguish capital letters and accents; for the other they are other words."""
    lower, cased = pieces
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


def test_berts_vocabulary_is_read(files):
    """Ids are the numbers of the lines; the longest piece comes first; [SEP] ends a document."""
    tokenizer = BertWordPieceLowerCase.from_vocab_file(files["vocab.txt"])
    assert tokenizer.encode("Hello, unaffable unknown") == [8, 9, 5, 6, 7, 1]
    assert tokenizer.begins_word.tolist() == [True] * 6 + [False] * 2 + [True] * 3
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.eod) == (0, 2, 3, 4, 3)
    assert BertWordPieceCase.from_vocab_file(files["vocab.txt"]).encode("Hello hello") == [10, 8]


@given(st.integers(1, 100), st.data())
def test_null_tokenizer_takes_ids_as_they_are(n, data):
    """Decoding prints the numbers, encoding reads them; n itself ends a document."""
    tokenizer = NullTokenizer(n)
    ids = data.draw(st.lists(st.integers(0, n)))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert (tokenizer.vocab_size, tokenizer.eod) == (n + 1, n)
    assert tokenizer.fingerprint == NullTokenizer(n).fingerprint != NullTokenizer(n + 1).fingerprint


def test_gpt2s_files_are_checked(gpt2_files, tmp_path):
    """Either foreign, a vocabulary without all bytes or without the end of a document; and with fewer
    merges, the same text would get other tokens.
    """
    (vocab, merges), bad = gpt2_files, str(tmp_path / "bad")
    lines, words = (Path(file).read_text("utf-8") for file in (merges, vocab))
    for files, content, said in (
        ((bad, merges), '{"a": 0}', "bad"), ((vocab, bad), "one two three\n", "are not GPT-2's"),
        ((bad, merges), words.replace(END_OF_DOCUMENT, "other"), "lacks '<.endoftext.>'"),
        ((vocab, bad), "".join(lines.splitlines(True)[:-1]), "--merge-file .* does not fit --vocab-file"),
    ):
        Path(bad).write_text(content, "utf-8")
        with pytest.raises(UserError, match=said):
            GPT2BPETokenizer(*files)


def test_a_file_at_which_the_library_panics(byte_pairs, tmp_path):
    """It is written in Rust, and what it raises then is not an Exception."""
    content = json.loads(byte_pairs.library.to_str())
    content["model"]["continuing_subword_prefix"] = 9999 * "x"
    (tmp_path / "t.json").write_text(json.dumps(content))
    for load in ByteLevelBPETokenizer.load, HuggingFaceTokenizer.load:
        with pytest.raises(UserError, match=r"t\.json is not a tokenizer.* out of range"):
            load(tmp_path / "t.json")


@pytest.mark.parametrize("name", TRAINED)
def test_a_foreign_tokenizer_file_is_refused(trained, name, tmp_path):
    """Missing, not JSON, JSON of something else, and another type's; a vocab.txt without one of the special tokens."""
    path, kind = tmp_path / "t.json", TRAINED[name]
    with pytest.raises(UserError, match=r"t\.json cannot be read"):
        kind.load(path)
    others = [one.library.to_str() for one in trained.values() if one.name != name]
    for content in "{}", "[" * 10**5, *others:
        path.write_text(content, "utf-8")
        with pytest.raises(UserError, match=rf"t\.json is not a tokenizer saved by this program as {name}"):
            kind.load(path)
    for content in ("", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n") if name.startswith("Bert") else ():
        path.write_text(content)
        with pytest.raises(UserError, match=r"--vocab-file .*t\.json is not a vocab.txt"):
            kind.from_vocab_file(str(path))


def test_options_choose_the_tokenizer(trained, files, gpt2_files, tmp_path):
    """Some are yet to be trained; the others are determined."""
    vocab, merges = gpt2_files
    assert choose_tokenizer("GPT2BPETokenizer", vocab_size=300, vocab_file=vocab, merge_file=merges).vocab_size == 300
    for name, tokenizer in trained.items():
        assert choose_tokenizer(name, vocab_size=300) is None
        tokenizer.save(tmp_path / "t.json")
        read = choose_tokenizer(name, vocab_size=tokenizer.vocab_size, tokenizer_model=str(tmp_path / "t.json"))
        assert (read.name, read.fingerprint) == (name, tokenizer.fingerprint)
        if name.startswith("Bert"):
            read = choose_tokenizer(name, vocab_size=11, vocab_file=files["vocab.txt"])
            assert (read.name, read.vocab_size) == (name, 11)
