"""The cache of tokens: made once, found afterwards, and never half-made."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpi_impl.data import cached
from mpi_impl.data.cached import CHECKSUMS, prepare
from mpi_impl.data.indexed import IndexedDataset, write_indexed
from mpi_impl.data.tokenizer import END_OF_DOCUMENT, ByteLevelBPETokenizer
from mpi_impl.data.tokenizer_choice import TokenizerChoice
from mpi_impl.runtime.files import ASIDE, folder_aside, locked
from reference.errors import UserError

TEXTS = {"a.txt": "the quick brown fox\n" * 20, "b.txt": "jumps over the lazy dog\n" * 20}
WHOLE = "".join(text + END_OF_DOCUMENT for text in TEXTS.values())
NUMBERS = {"tokenizer_type": "NullTokenizer", "vocab_size": 10}


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def make(corpus, cache):
    """Return a function that prepares the corpus with a small vocabulary, and returns (Prepared, the reports)."""

    def make(data_path=corpus, cache=cache, vocab_size=270, split_sentences=False, at=lambda sentence: None, **options):
        said, choice = [], TokenizerChoice(vocab_size=vocab_size, **options)

        def report(sentence):
            said.append(sentence)
            at(sentence)

        return prepare(str(data_path), choice, split_sentences, cache, report), "\n".join(said)

    return make


def text_of(prepared):
    return prepared.tokenizer.decode(IndexedDataset(prepared.prefix).tokens)


def test_the_tokens_are_the_corpus_and_a_second_run_finds_them(make, corpus):
    """Decoded, they are the documents in order, each with its end. What was done has been reported, files without text
    too; nothing is trained or encoded twice.
    """
    (corpus / "c.bin").write_bytes(b"\x00")
    first, said = make()
    assert text_of(first) == WHOLE
    assert "training" in said and "skipped 1 file" in said
    second, said = make()
    assert second.prefix == first.prefix and text_of(second) == WHOLE
    assert "training" not in said and "encoding" not in said


def test_whatever_determines_the_tokens_changes_the_name(make, corpus, monkeypatch):
    """Another vocabulary, borders of sentences, a changed file, a new file, another tokenizer, another version of the
    library.
    """
    names = [make()[0].prefix, make(vocab_size=280)[0].prefix, make(split_sentences=True)[0].prefix]
    (corpus / "a.txt").write_text("other text")
    names.append(make()[0].prefix)
    before = (corpus / "a.txt").stat()
    (corpus / "a.txt").write_text("texts other")  # of the same size, and as a copy keeps it, of the same time
    os.utime(corpus / "a.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    names.append(make()[0].prefix)
    (corpus / "c.txt").write_text("1 2 3")
    names.append(make()[0].prefix)
    names.append(make(corpus / "c.txt", vocab_size=271)[0].prefix)
    names.append(make(corpus / "c.txt", tokenizer_type="NullTokenizer")[0].prefix)      # of 270 ids, 271 in all
    monkeypatch.setattr(cached.tokenizers, "__version__", "another")
    names.append(make()[0].prefix)
    assert len(set(names)) == len(names)


def test_the_same_texts_in_another_place_have_the_same_name(make, corpus, tmp_path):
    """Whatever their names and times are."""
    first, moved = make()[0].prefix, tmp_path / "elsewhere"
    corpus.rename(moved)
    os.utime(moved / "a.txt", (0, 0))
    assert make(moved)[0].prefix == first


def test_the_end_of_documents_changes_the_name(make, tmp_path):
    """Of a model's files, one names the token that ends a document, and another the rows of its table."""
    library = ByteLevelBPETokenizer.train(["a b"], 257).library
    library.add_special_tokens(["<end>"])
    library.save(str(tmp_path / "tokenizer.json"))
    options = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "tokenizer.json"),
               "vocab_size": None}
    names = []
    for end, rows in ("<end>", 260), (END_OF_DOCUMENT, 260), (END_OF_DOCUMENT, 70_000):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows}))
        names.append(make(**options)[0].prefix)
    assert len(set(names)) == 3


def test_an_interrupted_run_leaves_nothing_and_is_done_again(make, cache):
    def interrupt(sentence):
        if sentence.startswith("encoding"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(at=interrupt)
    assert not list(cache.iterdir())
    assert text_of(make()[0]) == WHOLE


def test_two_jobs_at_the_same_time_end_with_one_result(make, cache):
    """A second job that starts and ends while the first is encoding disturbs nothing."""
    others = []
    prepared, _ = make(at=lambda sentence: sentence.startswith("encoding") and others.append(make()[0]))
    assert [other.prefix for other in others] == [prepared.prefix]
    assert text_of(prepared) == WHOLE and len(list(cache.iterdir())) == 1


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name, damage", [
    ("tokens.bin", change_a_byte), ("tokens.idx", change_a_byte), ("tokenizer.json", Path.unlink),
    (CHECKSUMS, change_a_byte)])
def test_a_damaged_result_is_made_again(make, name, damage):
    """A file that was lost, cut or changed in the cache."""
    path = Path(make()[0].prefix).with_name(name)
    whole = path.read_bytes()
    damage(path)
    _, said = make()
    assert path.read_bytes() == whole and f"{path.parent} is damaged" in said
    assert "encoding" not in make()[1]


@pytest.mark.parametrize("variable, folder", [("XDG_CACHE_HOME", ""), ("HOME", ".cache")])
def test_the_cache_is_where_the_environment_says(make, tmp_path, monkeypatch, variable, folder):
    """XDG_CACHE_HOME first, the home folder otherwise."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/no/such")
    monkeypatch.setenv(variable, str(tmp_path / "here"))
    assert Path(make(cache=None)[0].prefix).is_relative_to(tmp_path / "here" / folder / "shardlab")


# ---- a Megatron pair ------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    """Return the prefix of a Megatron pair, in a folder with nothing else."""
    (tmp_path / "made").mkdir()
    prefix = tmp_path / "made" / "my.corpus"
    write_indexed(prefix, [np.array([3, 1, 4])], 10)
    return str(prefix)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_megatron_prefix_is_used_as_it_is(make, pair, suffix, cache):
    """The prefix, or either of its files; nothing is written. The prefix of a lost pair is not a missing text file."""
    prepared, said = make(pair + suffix, **NUMBERS)
    assert prepared.prefix == pair and text_of(prepared) == "3 1 4"
    assert "3 tokens in 1 document, vocabulary 11" in said
    assert not cache.exists()
    if suffix:
        Path(pair + suffix).unlink()
        with pytest.raises(UserError, match=rf"my\.corpus\{suffix} is missing"):
            make(pair, **NUMBERS)


# ---- other tokenizers -----------------------------------------------------------------------------------------------


def test_a_corpus_for_bert_has_its_sentences(make, tmp_path):
    """Each document has a sequence for each of its sentences, by the WordPiece tokenizer that was trained or is given.
    """
    (tmp_path / "prose.txt").write_text("The quick brown fox jumps. Over the lazy dog?\n\nIt does.")
    options = {}
    for trained in True, False:
        prepared, said = make(tmp_path / "prose.txt", tokenizer_type="BertWordPieceLowerCase", split_sentences=True,
                              **options)
        dataset = IndexedDataset(prepared.prefix)
        assert [prepared.tokenizer.decode(sentence) for sentence in dataset] == [
            "the quick brown fox jumps.", "over the lazy dog?", "it does."]
        assert dataset.document_indices.tolist() == [0, 3] and ("training" in said) == trained
        options = {"tokenizer_model": str(Path(prepared.prefix).with_name("tokenizer.json")), "vocab_size": None}


def test_a_cache_inside_the_corpus_is_no_part_of_it(make, corpus):
    """Otherwise the tokenizer that one run writes is text to the next, which trains again."""
    (first, _), (second, said) = (make(cache=corpus / "sub" / "cache") for _ in range(2))
    assert first.prefix == second.prefix and "training" not in said
    assert text_of(second) == WHOLE


def test_what_killed_runs_have_left_is_removed_by_the_next(make, cache):
    """But not what another run is at work on, nor what it may be about to lock, nor anything else."""
    others = {f"{ASIDE}brandnew", f"{ASIDE}a_longer_name", ASIDE, "unfinished"}
    for name in {f"{ASIDE}abandone", f"{ASIDE}attended", *others}:
        (cache / name / "tokens").mkdir(parents=True)
        os.utime(cache / name, None if name.endswith("brandnew") else (0, 0))
    with locked(str(cache / f"{ASIDE}attended")):
        made = Path(make()[0].prefix).parent.name
    assert {path.name for path in cache.iterdir()} == {f"{ASIDE}attended", made, *others}
    made = {made, Path(make(vocab_size=280)[0].prefix).parent.name}
    assert {path.name for path in cache.iterdir()} == {*made, *others}


def test_while_a_folder_is_made_it_is_locked_and_a_kill_unlocks_it(tmp_path):
    """A program that is killed leaves its folder; whoever comes next removes that."""
    program = f"""import os, signal
from mpi_impl.runtime.files import folder_aside
with folder_aside({str(tmp_path)!r}) as folder:
    os.utime(folder, (0, 0))
    with folder_aside({str(tmp_path)!r}):
        assert os.path.isdir(folder)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with folder_aside(str(tmp_path)) as folder:
        assert [str(path) for path in tmp_path.iterdir()] == [folder]
    assert not list(tmp_path.iterdir())
