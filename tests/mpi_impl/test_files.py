"""Files are written whole or not at all, and only regular files are read; no output takes the place of another file."""
import os
import resource
import sys
from argparse import Namespace
from contextlib import contextmanager
from unittest import mock

import pytest
from matplotlib.figure import Figure

from mpi_impl.comm.trace import Slice
from mpi_impl.data import saved_tokenizer
from mpi_impl.data.tokenizer import ByteLevelBPETokenizer
from mpi_impl.runtime import pictures
from mpi_impl.runtime.files import (check_folder, check_readable, check_writable, open_for_writing, read_bytes,
                                    read_text, replacing, write_whole)
from mpi_impl.runtime.outputs import check_outputs
from reference.errors import UserError
from shardlab.plan import profiles
from shardlab.report.timelines.chrome_trace import write_chrome_trace
from tests.plan_cases import REAL

LIMIT = 200     # bytes that fit on the disk


@contextmanager
def full_disk():
    """Limit the size of files, so that writing beyond it fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(sys, "dont_write_bytecode", True):    # of a module imported now, half would be in the cache
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def draw(path):
    figure = Figure()
    figure.subplots().plot([1, 2], [3, 4])
    pictures.save(figure, path)


TOKENIZER = ByteLevelBPETokenizer.train(["a few words"], 300)
WRITERS = {
    "text": lambda path: write_whole(path, "many " * LIMIT),
    "a.png": draw,
    "trace.json": lambda path: write_chrome_trace(path, [[Slice("compute", "0F0", "F", float(i), i + 0.5)
                                                          for i in range(LIMIT)]]),
    "machine.toml": lambda path: profiles.save(REAL, path),
    saved_tokenizer.SAVED: lambda path: saved_tokenizer.save(TOKENIZER, os.path.dirname(path)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_there_whole_or_as_it_was(tmp_path, name):
    """On a full disk the old file stays, or none; nothing is left beside it. With room it is the new one."""
    path, write = tmp_path / name, WRITERS[name]
    for before in (None, "the last run's"):
        if before:
            path.write_text(before)
        with full_disk(), pytest.raises(UserError, match=f"{name} cannot be written: File too large"):
            write(str(path))
        assert [one.read_text() for one in tmp_path.iterdir()] == ([before] if before else [])
    write(str(path))
    assert [one.name for one in tmp_path.iterdir()] == [name] and path.stat().st_size > LIMIT


def test_until_the_end_the_old_file_stands_there(tmp_path):
    """So whoever reads meanwhile, or kills the writer, has that. Its mode stays; a link's file stays as it is."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with replacing(str(link)) as aside:
        assert os.path.dirname(aside) == str(tmp_path)
        with open(aside, "w") as file:
            file.write("new")
        assert path.read_text() == "old"
    assert path.read_text() == "old"
    assert link.read_text() == "new" and link.stat().st_mode & 0o777 == 0o640 and not link.is_symlink()


def test_texts_are_read_as_python_reads_utf_8_with_its_signature(tmp_path):
    """A byte-order mark at the beginning is not text; UTF-16 is refused."""
    path = tmp_path / "prompts"
    path.write_text("one\ufeff\ntwo", "utf-8-sig")
    assert read_text(str(path)) == path.read_text("utf-8-sig") == "one\ufeff\ntwo"
    path.write_text("one", "utf-16")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_text(str(path))


def test_a_file_of_lines_keeps_what_it_begins_with_on_a_full_disk(tmp_path):
    """What a run has written before it goes on is there again whole, or still."""
    path = tmp_path / "metrics"
    path.write_text("old\n")
    with full_disk(), pytest.raises(UserError, match="File too large"):
        open_for_writing(str(path), "line\n" * LIMIT)
    assert path.read_text() == "old\n"
    with open_for_writing(str(path), "old\n") as file:
        file.write("new\n")
    assert path.read_text() == "old\nnew\n"


@pytest.fixture
def odd(tmp_path):
    """Make a pipe, a link to an endless device, a link to a missing file, and a folder."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize("name, reads, writes", [
    ("pipe", "it is a pipe or a device", "a link to nowhere, a pipe"), ("folder", "Is a directory", "a folder"),
    ("endless", "it is a pipe or a device", "a link to nowhere, a pipe"),
    ("nowhere", "No such file or directory", "a link to nowhere, a pipe")])
def test_only_files_are_read_and_written(odd, name, reads, writes):
    """Immediately: opening a pipe would wait for who writes into it."""
    for read in (read_bytes, read_text, check_readable):
        with pytest.raises(UserError, match=f"{name} cannot be read: {reads}"):
            read(str(odd / name))
    for check in (check_writable, open_for_writing, lambda path: write_whole(path, "")):
        with pytest.raises(UserError, match=f"{name} cannot be written: it is {writes}"):
            check(str(odd / name))
    assert not (odd / name).is_file()


@pytest.mark.parametrize("name, says", [
    ("caf\udce9", "its name is not UTF-8"), ("a\0b", "no name has a zero byte"),
    ("/".join(["x"] * 1900), r"of 1,\d+ folders in one another is too deep"), ("n" * 300, "File name too long")])
def test_names_that_a_library_would_refuse_in_the_end_are_refused_now(tmp_path, name, says):
    """As a file or a folder; and nothing is made."""
    for check in (check_writable, check_folder):
        with pytest.raises(UserError, match=says):
            check(os.path.join(tmp_path, name))
    assert not list(tmp_path.iterdir())


# ---- no output takes the place of an input or of another output, by whatever name -----------------------------------


NAMES = ["run/latest_checkpointed_iteration.txt", "run/iter_0000003/manifest.json", "run/tokenizer.json",
         "run/metrics", "hf/config.json", "hf/model.safetensors", "hf/vocab.json", "corpus/a.txt",
         "corpus/trace.json", "pair.bin", "pair.idx", "tokenizer.json", "machine.toml", "plan.csv", "prompts"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Make a checkpoint, a model in Hugging Face's layout, a corpus and a tokenizer; each file holds its own name.
    Check in the end that none was changed.
    """
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    yield
    assert all((tmp_path / name).read_text() == name for name in NAMES)


def named(options) -> Namespace:
    """Return options as a program parses them: '--plot a --data-path b c'."""
    found = {}
    for option in options.split("--")[1:]:
        name, *values = option.split()
        found[name.replace("-", "_")] = values[0] if len(values) == 1 else values or ""
    return Namespace(**found)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_to_an_input_is_that_input(files, link):
    link(os.path.abspath("tokenizer.json"), "linked")
    with pytest.raises(UserError, match="linked is a file that --tokenizer-model reads"):
        check_outputs(named("--metrics-file linked --tokenizer-model tokenizer.json"))
    os.symlink(os.path.abspath("run"), "other")
    with pytest.raises(UserError, match="manifest.json is a file that --load reads in other"):
        check_outputs(named("--ledger run/iter_0000003/manifest.json --load other"))


@pytest.mark.parametrize("options", [
    "--load run --save run --metrics-file run/metrics --plot run/losses.png --ledger run/ledger.json --trace run "
    "--record run", "--load-hf hf --save-hf model --metrics-file hf/metrics --data-path corpus",
    "--save run --load run --tokenizer-model run/tokenizer.json",
    "--data-path corpus --metrics-file corpus/new --offload-folder corpus", ""])
def test_what_people_do_is_not_refused(files, options):
    """All in one folder, beside the checkpoints that a run goes on from; and again, when the files are there."""
    for _ in range(2):
        check_outputs(named(options))
        for name in ("run/trace.json", "run/timeline.png", "run/recording.json", "run/losses.png"):
            if "trace" in options:
                open(name, "w").close()
