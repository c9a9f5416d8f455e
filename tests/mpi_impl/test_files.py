"""Files are written whole or not at all, and only regular files are read: nothing half, nothing that never ends."""
import os
import resource
import sys
from contextlib import contextmanager
from unittest import mock

import pytest
from matplotlib.figure import Figure

from mpi_impl.comm.trace import Slice
from mpi_impl.data import saved_tokenizer
from mpi_impl.data.tokenizer import ByteLevelBPETokenizer
from mpi_impl.planning import profiles
from mpi_impl.reports.timelines.chrome_trace import write_chrome_trace
from mpi_impl.runtime import pictures
from mpi_impl.runtime.files import (check_ending, check_folder, check_readable, check_writable, open_for_writing,
                                    read_bytes, read_text, replacing, write_whole)
from reference.errors import UserError
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
    "a.png": draw, "a.pdf": draw, "a.svg": draw,
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
    """So whoever reads meanwhile, or kills the writer, has that; its mode and the link to it stay."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with replacing(str(link)) as aside:
        assert os.path.dirname(aside) == str(tmp_path)
        with open(aside, "w") as file:
            file.write("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640 and link.is_symlink()


def test_what_is_written_aside_takes_no_place_of_another_file(tmp_path):
    """Whatever they are called: every other file stays."""
    others = {name: f"mine: {name}" for name in ("unfinished-a.png", "unfinished-", "a.png.new")}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    check_writable(str(tmp_path / "a.png"))
    draw(str(tmp_path / "a.png"))
    assert {name: (tmp_path / name).read_text() for name in others} == others
    assert len(list(tmp_path.iterdir())) == len(others) + 1


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


@pytest.mark.parametrize("name, says", [
    ("pipe", "it is a pipe or a device"), ("endless", "it is a pipe or a device"),
    ("nowhere", "No such file or directory"), ("folder", "Is a directory")])
def test_only_files_are_read(odd, name, says):
    """At once: opening a pipe would wait for who writes into it."""
    for read in (read_bytes, read_text, check_readable):
        with pytest.raises(UserError, match=f"{name} cannot be read: {says}"):
            read(str(odd / name))


@pytest.mark.parametrize("name, says", [
    ("pipe", "a link to nowhere, a pipe or a device"), ("endless", "a link to nowhere, a pipe or a device"),
    ("nowhere", "a link to nowhere, a pipe or a device"), ("folder", "a folder")])
def test_only_files_are_written(odd, name, says):
    for check in (check_writable, open_for_writing, lambda path: write_whole(path, "")):
        with pytest.raises(UserError, match=f"{name} cannot be written: it is {says}"):
            check(str(odd / name))
    assert not (odd / name).is_file()


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 11)
    assert read_bytes(str(tmp_path / "file"), 11) == b"x" * 11
    with pytest.raises(UserError, match="has 11 bytes, but a file of its kind has at most 10"):
        read_bytes(str(tmp_path / "file"), 10)


@pytest.mark.parametrize("name, says", [
    ("caf\udce9", "its name is not UTF-8"), ("a\0b", "no name has a zero byte"),
    ("/".join(["x"] * 1900), r"of 1,\d+ folders in one another is too deep"), ("n" * 300, "File name too long")])
def test_names_that_a_library_would_refuse_in_the_end_are_refused_now(tmp_path, name, says):
    """As a file or a folder; and nothing is made."""
    for check in (check_writable, check_folder):
        with pytest.raises(UserError, match=says):
            check(os.path.join(tmp_path, name))
    assert not list(tmp_path.iterdir())


def test_a_picture_has_a_name_that_says_its_format(tmp_path):
    for name in ("a.png", "a.pdf", "a.svg"):
        check_ending(str(tmp_path / name))
    with pytest.raises(UserError, match=r"--plot is 'a.jpg', but must be a file that ends in .png, .pdf, .svg."):
        check_ending("a.jpg")
