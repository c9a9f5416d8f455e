"""The cache of tokens: made once, found afterwards, and never half-made."""
import errno
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
SMALL = TokenizerChoice(vocab_size=270)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return str(folder)


@pytest.fixture
def make(corpus, tmp_path):
    """Return a function that prepares the corpus with a small vocabulary, and returns (Prepared, the reports)."""

    def make(data_path=corpus, vocab_size=270, cache=tmp_path / "cache", split_sentences=False, **options):
        said, choice = [], TokenizerChoice(vocab_size=vocab_size, **options)
        return prepare(data_path, choice, split_sentences, cache, said.append), "\n".join(said)

    return make


def text_of(prepared):
    return prepared.tokenizer.decode(IndexedDataset(prepared.prefix).tokens)


def test_the_tokens_are_the_corpus(make):
    """Decoded, they are the documents in order, each with its end; and what was done has been said."""
    prepared, said = make()
    assert text_of(prepared) == "".join(text + END_OF_DOCUMENT for text in TEXTS.values())
    assert "training a 270-token byte-level BPE on" in said and "2 files, 880 bytes" in said
    assert "in 2 documents" in said


def test_a_second_run_finds_the_first(make):
    """Nothing is trained or encoded again."""
    first, _ = make()
    second, said = make()
    assert second.prefix == first.prefix
    assert text_of(second) == text_of(first)
    assert "training" not in said and "encoding" not in said


def test_whatever_determines_the_tokens_changes_the_name(make, corpus, monkeypatch):
    """Another vocabulary, a changed file, a new file, another tokenizer, another version of the library."""
    names = [make()[0].prefix, make(vocab_size=280)[0].prefix]
    Path(corpus, "a.txt").write_text("other text")
    names.append(make()[0].prefix)
    os.utime(Path(corpus, "a.txt"), (0, 0))  # changed at another time, of the same size
    names.append(make()[0].prefix)
    Path(corpus, "c.txt").write_text("1 2 3")
    names.append(make()[0].prefix)
    names.append(make(str(Path(corpus, "c.txt")), vocab_size=271)[0].prefix)
    names.append(make(str(Path(corpus, "c.txt")), tokenizer_type="NullTokenizer")[0].prefix)  # of 270 ids, 271 in all
    monkeypatch.setattr(cached.tokenizers, "__version__", "another")
    names.append(make()[0].prefix)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("stage", ["training", "encoding"])
def test_an_interrupted_run_leaves_nothing_and_is_done_again(make, corpus, tmp_path, stage):
    """Whichever stage it was in."""

    def interrupt(sentence):
        if sentence.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, SMALL, cache=tmp_path / "cache", report=interrupt)
    assert not list((tmp_path / "cache").iterdir())
    assert text_of(make()[0]).startswith("the quick")


def test_two_jobs_at_once_end_with_one_result(make, corpus, tmp_path):
    """A second job that starts and ends while the first is encoding disturbs nothing."""
    others = []

    def other_job(sentence):
        if sentence.startswith("encoding"):
            others.append(make()[0])

    prepared = prepare(corpus, SMALL, cache=tmp_path / "cache", report=other_job)
    assert [other.prefix for other in others] == [prepared.prefix]
    assert text_of(prepared) == text_of(others[0])
    assert len(list((tmp_path / "cache").iterdir())) == 1


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "tokenizer.json", CHECKSUMS])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1]), change_a_byte])
def test_a_damaged_result_is_made_again(make, name, damage):
    """A file that was lost, cut or changed in the cache."""
    prepared, _ = make()
    path = Path(prepared.prefix).with_name(name)
    whole = path.read_bytes()
    damage(path)
    _, said = make()
    assert path.read_bytes() == whole and f"{path.parent} is damaged" in said
    assert "encoding" not in make()[1]


def test_a_small_corpus_gives_a_small_vocabulary_and_says_so(make):
    """The tokenizer has the number it really has, in the first run and the second."""
    for _ in range(2):
        prepared, said = make(vocab_size=5000)
        assert 257 < prepared.tokenizer.vocab_size < 400
        assert f"the vocabulary has {prepared.tokenizer.vocab_size} tokens, not the 5,000 asked for" in said


def test_files_that_are_not_text_are_counted(make, corpus):
    """They are skipped, and one is named."""
    Path(corpus, "c.bin").write_bytes(b"\x00")
    assert "skipped 1 file without UTF-8 text, the first of which is" in make()[1]


def test_the_cache_is_where_the_environment_says(corpus, tmp_path, monkeypatch):
    """XDG_CACHE_HOME first, the home folder otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert prepare(corpus, SMALL).prefix.startswith(str(tmp_path / "xdg" / "shardlab"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prepare(corpus, SMALL).prefix.startswith(str(tmp_path / "home" / ".cache" / "shardlab"))


def test_a_cache_that_cannot_be_written_is_a_sentence(make, tmp_path):
    """Here a file stands where the folder should be: that stops even the superuser."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"The cache folder .*file/cache cannot be written.*--data-cache-path"):
        make(cache=tmp_path / "file" / "cache")


@pytest.fixture
def ready_made(tmp_path):
    """Return the prefix of a Megatron pair, in a folder with nothing else."""
    (tmp_path / "made").mkdir()
    prefix = tmp_path / "made" / "my.corpus"
    write_indexed(prefix, [np.array([3, 1, 4])], 10)
    return str(prefix)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_a_megatron_prefix_is_used_as_it_is(make, ready_made, suffix, tmp_path):
    """The prefix, or either of its files; nothing is written."""
    prepared, said = make(ready_made + suffix, tokenizer_type="NullTokenizer", vocab_size=10)
    assert prepared.prefix == ready_made
    assert text_of(prepared) == "3 1 4"
    assert "3 tokens in 1 document, vocabulary 11" in said
    assert not (tmp_path / "cache").exists()


def test_folders_are_no_megatron_pair(make, corpus):
    """Whatever they are called: beside them the corpus is a corpus."""
    for suffix in (".bin", ".idx"):
        os.mkdir(corpus + suffix)
    prepared, _ = make()
    assert "brown fox" in text_of(prepared)


def test_a_megatron_prefix_needs_the_tokenizer_it_was_made_with(make, ready_made):
    """Ours cannot be trained on tokens."""
    sentence = r"already tokenized.*--tokenizer-model.*GPT2BPETokenizer with --vocab-file.*NullTokenizer with"
    with pytest.raises(UserError, match=sentence):
        make(ready_made)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_a_megatron_pair_is_named(make, ready_made, suffix):
    """The prefix of a lost pair is not a missing text file."""
    Path(ready_made + suffix).unlink()
    with pytest.raises(UserError, match=rf"my\.corpus\{suffix} is missing"):
        make(ready_made, tokenizer_type="NullTokenizer", vocab_size=10)


def test_gpt2_files_encode_a_corpus(make, tmp_path):
    """The pair of files that one tokenizer wrote gives the tokens that the tokenizer gives."""
    trained = ByteLevelBPETokenizer.train(TEXTS.values(), 270)
    trained.library.model.save(str(tmp_path))
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    prepared, said = make(tokenizer_type="GPT2BPETokenizer", vocab_size=None, **files)
    assert text_of(prepared).startswith("the quick")
    assert "training" not in said
    assert list(IndexedDataset(prepared.prefix)[0]) == [*trained.encode(TEXTS["a.txt"]), trained.eod]


def test_a_corpus_for_bert_has_its_sentences(make, tmp_path):
    """Each document has a sequence for each of its sentences, by the WordPiece tokenizer that was trained or is given.
    """
    (tmp_path / "prose.txt").write_text("The quick brown fox jumps. Over the lazy dog?\n\nIt does.")
    saved = None
    for tokenizer_model in None, "saved":
        options = {"tokenizer_model": saved, "vocab_size": None} if tokenizer_model else {}
        prepared, said = make(str(tmp_path / "prose.txt"), tokenizer_type="BertWordPieceLowerCase",
                              split_sentences=True, **options)
        dataset = IndexedDataset(prepared.prefix)
        assert [prepared.tokenizer.decode(sentence) for sentence in dataset] == [
            "the quick brown fox jumps.", "over the lazy dog?", "it does."]
        assert dataset.document_indices.tolist() == [0, 3] and ("training" in said) == (saved is None)
        saved = str(Path(prepared.prefix).with_name("tokenizer.json"))


def test_sentences_are_another_result(make):
    """The same corpus and tokenizer without borders of sentences lies elsewhere."""
    assert make()[0].prefix != make(split_sentences=True)[0].prefix


def test_ids_in_a_text_file_need_no_tokenizer(make, tmp_path):
    """NullTokenizer reads numbers, one document each file."""
    (tmp_path / "ids.txt").write_text("3 1 4\n1 5\n")
    prepared, _ = make(str(tmp_path / "ids.txt"), tokenizer_type="NullTokenizer", vocab_size=9)
    assert text_of(prepared) == "3 1 4 1 5 9"


def test_an_empty_corpus_leaves_no_trace(make, tmp_path):
    """Neither a folder that looks finished nor one that does not."""
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="The corpus is empty"):
        make(str(tmp_path / "empty.txt"))
    assert not list((tmp_path / "cache").iterdir())


def test_a_full_disk_is_a_sentence(make, monkeypatch):
    """Whatever is being written: here the tokenizer."""

    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(UserError, match=r"cannot be written \(.*No space left.*--data-cache-path"):
        make()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_tokenizer_that_cannot_be_saved_is_an_oserror():
    """The library's own save raises a bare Exception, which nobody can catch with care."""
    with pytest.raises(OSError, match="No space left"):
        ByteLevelBPETokenizer.train(TEXTS.values(), 270).save("/dev/full")


def test_a_cache_inside_the_corpus_is_no_part_of_it(make, corpus):
    """Otherwise the tokenizer that one run writes is text to the next, which trains again."""
    cache = Path(corpus, "sub", "cache")
    first, _ = make(cache=cache)
    second, said = make(cache=cache)
    assert first.prefix == second.prefix and "training" not in said
    assert text_of(second) == "".join(text + END_OF_DOCUMENT for text in TEXTS.values())


def test_a_cache_that_is_the_corpus_is_refused(make, corpus):
    """Its folders cannot be told from those of the texts."""
    with pytest.raises(UserError, match="is the cache folder"):
        make(cache=corpus)


def test_an_empty_path_is_refused(make):
    """It is not the standard library, which nobody asked for."""
    with pytest.raises(UserError, match="--data-path is empty"):
        make(data_path="")


def test_what_killed_runs_have_left_is_removed_by_the_next(make, tmp_path):
    """But not what another run is at work on, nor what it may be about to lock, nor anything else."""
    cache = tmp_path / "cache"
    for name in ("abandone", "attended", "brandnew", "a_longer_name"):
        (cache / f"{ASIDE}{name}" / "tokens").mkdir(parents=True)
        os.utime(cache / f"{ASIDE}{name}", None if name == "brandnew" else (0, 0))
    with locked(str(cache / f"{ASIDE}attended")):
        make()
    assert {path.name.removeprefix(ASIDE) for path in cache.glob(f"{ASIDE}*")} == {
        "attended", "brandnew", "a_longer_name"}
    make(vocab_size=280)
    assert {path.name.removeprefix(ASIDE) for path in cache.glob(f"{ASIDE}*")} == {"brandnew", "a_longer_name"}


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
