"""Any damage to a checkpoint, and any failure of its writing, is reported, and the last good checkpoint stays."""
import errno
import os
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.checkpoints import checkpoint, on_disk
from mpi_impl.checkpoints.folder_lock import LOCK, only_saver
from mpi_impl.checkpoints.on_disk import TRACKER
from reference.errors import UserError
from tests.checkpoints.saved_runs import ALONE, SMALL, Run, load_and_train, load_says
from tests.checkpoints.test_resumed_runs import OPTIONS, data  # noqa: F401  a fixture
from tests.program import pretrain, refusal
from tests.training_theorems import connected

# ---- whatever happens to the files ----------------------------------------------------------------------------------


@given(st.randoms(use_true_random=False), st.integers(1, 255))
def test_a_changed_byte_is_found_wherever_it_is(ranks, saved_root, random, change):
    """The load fails, and names the file: tracker, manifest, its checksum, or shards (a header, an element)."""
    with tempfile.TemporaryDirectory() as root:
        shutil.copytree(saved_root, root, dirs_exist_ok=True)
        path = random.choice(sorted(path for path in Path(root).rglob("*") if path.is_file()))
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= change
        path.write_bytes(content)
        said = load_says(ranks, SMALL, root)
        assert path.name in said or path.name.removesuffix(".sha256") in said


@pytest.mark.parametrize("name", [TRACKER, *(f"iter_0000001/{name}" for name in (
    "manifest.json", "manifest.json.sha256", "m-00001.safetensors"))])
def test_a_missing_a_short_or_a_long_file_is_found(ranks, copy, name):
    """Each in turn, by name: also if one rank loads, and has all files to check."""
    path, named = copy / name, str(copy / name).removesuffix(".sha256")
    content = path.read_bytes()
    for wrong in (content[:len(content) // 2], b"", content + b"\0"):
        path.write_bytes(wrong)
        assert named in load_says(ranks, SMALL, copy)
    assert named in load_says(ranks, ALONE, copy)
    path.unlink()
    assert named in load_says(ranks, SMALL, copy)
    path.mkdir()
    assert f"{path} cannot be read: Is a directory." in load_says(ranks, SMALL, copy)


def test_a_checkpoint_without_its_folder_or_under_another_name(ranks, copy):
    (copy / "iter_0000001").rename(copy / "iter_0000003")
    said = load_says(ranks, SMALL, copy)
    assert "iter_0000001 is not there" in said and "holds the checkpoint of iteration 3" in said
    (copy / TRACKER).write_text("3\n")
    assert "manifest.json is of iteration 1" in load_says(ranks, SMALL, copy)
    assert f"--load {copy}/none holds no checkpoint" in load_says(ranks, ALONE, copy / "none")


# ---- how it is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", on_disk.TYPES)
def test_elements_begin_at_a_multiple_of_8(tmp_path, dtype):
    """However long the names are: who maps a file into memory finds its arrays aligned."""
    for length in range(1, 10):
        x, y = np.arange(6, dtype=dtype), np.arange(4, dtype=dtype)
        path, shapes = tmp_path / f"{length}.safetensors", {"x" * length: (2, 3), "y": (4,)}
        on_disk.write_tensors(str(path), dtype, shapes, [x[:4], x[4:], y], {})
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        assert begin % 8 == 0 and content[begin:] == x.tobytes() + y.tobytes()


# ---- whatever happens while it is written ---------------------------------------------------------------------------

OPERATIONS = ("fsync", "rename", "replace", "mkdir", "listdir", "open")     # of the module os


def record_save(group, run: Run, root) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """Return one save's operations on files, in order, with their files; and the paths of files by number."""
    asked = []

    def recorded(name, place):
        def call(*args):
            asked.append((name, place(*args)))
            return getattr(os, name)(*args)
        return call

    recorder = mock.Mock(wraps=os, path=os.path, O_RDONLY=os.O_RDONLY)
    recorder.fsync = recorded("fsync", lambda file: os.fstat(file).st_ino)
    recorder.rename = recorded("rename", lambda source, _: os.stat(source).st_ino)
    recorder.replace = recorded("replace", lambda source, _: os.stat(source).st_ino)
    with mock.patch.object(on_disk, "os", recorder):
        save_again(group, run, root, 1)
    return asked, {str(path.relative_to(root)): path.stat().st_ino for path in [root, *root.rglob("*")]}


def test_everything_is_on_the_disk_before_it_gets_its_name(ranks, tmp_path):
    """Though the power may fail: the files and their folder before the rename, and that before the tracker's."""
    (asked, files), = ranks.run(1, record_save, ALONE, tmp_path)
    folder, tracker, top = files["iter_0000001"], files[TRACKER], files["."]
    named = asked.index(("rename", folder))
    assert {("fsync", file) for file in files.values()} == set(asked[:named])
    assert asked[named - 2:named] == [("fsync", folder), ("fsync", top)], "names of files that come later may be lost"
    assert asked[named + 1:] == [("fsync", top), ("replace", tracker), ("fsync", top)]


class Killed(BaseException):
    """No handler of errors may catch it: it stands for the end of the process."""


class Failing:
    """Stands for `os` in the module that writes: the n-th operation fails, before it does anything."""

    def __init__(self, n: int, error: BaseException):
        self.left, self.error = n, error

    def __getattr__(self, name):
        return self.counted(getattr(os, name)) if name in OPERATIONS else getattr(os, name)

    def counted(self, operation):
        def call(*args):
            self.left -= 1
            if self.left == 0:
                raise self.error
            return operation(*args)
        return call


def failing_saves(group, run: Run, root, failing_rank: int, error: BaseException) -> list[str]:
    """Save a good checkpoint of step 1. Then save step 2 repeatedly; each time another of a rank's operations on files
    fails, until none does. After each failure the last good checkpoint must load.

    Return the message of every failed save that did not kill the rank.
    """
    root, said = str(root), []
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer, fresh = run.trainer(topology), run.trainer(topology)
        run.step(trainer)
        checkpoint.save(trainer, root, {})
        run.step(trainer)
        n, good = 1, 1
        while True:
            failing = Failing(n if group.rank == failing_rank else -1, error)
            with mock.patch.object(on_disk, "os", failing), one_file_at_a_time():
                try:
                    checkpoint.save(trainer, root, {})
                    assert failing.left > 0 or group.rank != failing_rank
                    return said
                except UserError as refused:
                    said.append(str(refused))
                    assert not [name for name in os.listdir(root) if re.fullmatch(r"iter_\d+\.\w+\.tmp", name)]
                except Killed:
                    pass
            group.broadcast_object(lambda: on_disk.finish(root))
            manifest = on_disk.read_manifest(root)
            assert manifest.iteration >= good
            good = manifest.iteration
            checkpoint.load(fresh, root, manifest)
            if good == 2:       # the tracker is the last to be written: it is there, though perhaps not on the disk
                return said
            n += 1


def one_file_at_a_time():
    """Let a save write its files one after another, so that its operations have an order."""
    return mock.patch.object(checkpoint, "ThreadPoolExecutor", partial(ThreadPoolExecutor, 1))


def test_killed_while_it_writes(ranks, tmp_path):
    """After a kill at any operation on files the last good checkpoint loads, and the next run clears the rest."""
    ranks.run(1, failing_saves, ALONE, tmp_path, 0, Killed())
    assert list(tmp_path.glob("*.tmp"))
    with only_saver(str(tmp_path)):
        ranks.run(1, load_and_train, ALONE, tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "iter_0000002", TRACKER, LOCK]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fails_while_it_writes(ranks, tmp_path, rank):
    """Each operation of a rank fails in turn: all ranks report the same file, and remove the unfinished folder."""
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    one, other = ranks.run(2, failing_saves, SMALL, tmp_path, rank, error)
    assert one == other and len(one) > 2
    assert all(re.match(rf"{tmp_path}.* cannot be (written|read): No space left on device\.", said) for said in one)
    if rank == 0:
        assert {re.match(r"\S+", said)[0].split("/")[-1] for said in one} > {
            "m-00000.safetensors", "manifest.json", "manifest.json.sha256", "iter_0000002"}


def test_a_disk_that_fails_before_the_end_of_a_file(tmp_path, monkeypatch):
    """The system reports lost bytes once: every time that a file is forced to the disk counts, not only the last."""
    path, elements = str(tmp_path / "m.safetensors"), [np.ones(64, np.float32)] * 4
    monkeypatch.setattr(on_disk, "SYNC_EVERY", 256)
    for n in (1, 2, 3):
        monkeypatch.setattr(on_disk, "os", Failing(n, OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(UserError, match="m.safetensors cannot be written: Input/output error"):
            on_disk.write_tensors(path, "float32", {"x": (256,)}, elements)


def save_again(group, run: Run, root, iteration: int) -> None:
    with connected(group, run.plan.parallel(group.size, run.case)) as topology:
        trainer = run.trainer(topology)
        trainer.iteration = iteration
        checkpoint.save(trainer, str(root), {})


@pytest.mark.parametrize("tracker, iteration", [("2", 2), ("3", 2), ("1", 2), (None, 3)])
def test_no_checkpoint_is_written_again(ranks, copy, tracker, iteration):
    """Neither one that the tracker names nor another: the next save is refused, and every file stays."""
    ranks.run(2, save_again, SMALL, copy, 2)
    (copy / TRACKER).unlink()
    if tracker:
        (copy / TRACKER).write_text(tracker)
    before = contents(copy)
    assert f"--save {copy} holds" in ranks.run(1, refusal, save_again, ALONE, copy, iteration)[0]
    assert contents(copy) == before


def contents(root) -> dict[str, bytes]:
    """Return all files below a folder but the lock."""
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != LOCK}


def test_without_its_tracker_a_folder_is_neither_loaded_nor_saved_into(ranks, data, tmp_path):  # noqa: F811
    """Each way to continue is refused before the first step, with the number to write into the tracker; with it the run
    resumes.
    """
    run = [*OPTIONS, *data, "--save", str(tmp_path), "--train-iters"]
    ranks.run(1, pretrain, [*run, "1"])
    (tmp_path / TRACKER).unlink()
    before = contents(tmp_path)
    for options in [], ["--load", str(tmp_path)]:
        (said,) = ranks.run(1, refusal, pretrain, [*run, "2", *options])
        assert f"the checkpoint of iteration 1: to load one, write its number into {TRACKER}" in said
    assert contents(tmp_path) == before
    (tmp_path / TRACKER).write_text("1")
    ranks.run(1, pretrain, [*run, "2", "--load", str(tmp_path)])
    assert on_disk.saved(str(tmp_path)) == [1, 2]


@pytest.mark.parametrize("named, pending, finished", [
    (1, b"2", 2), (None, b"2", 2), (2, b"1", 2), (1, b"3", 1), (None, b"", None), (1, b"2 ", 1)])
def test_a_tracker_on_its_way_is_taken_only_forward_and_to_what_is_there(tmp_path, named, pending, finished):
    """It may have been cut short, and its checkpoint may never have got its name."""
    for iteration in 1, 2:
        os.mkdir(on_disk.folder_of(str(tmp_path), iteration))
    (tmp_path / f"{TRACKER}.tmp").write_bytes(pending)
    if named:
        (tmp_path / TRACKER).write_text(str(named))
    with only_saver(str(tmp_path)):
        assert on_disk.tracked(str(tmp_path)) == finished
