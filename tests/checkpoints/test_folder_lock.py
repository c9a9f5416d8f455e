"""Two runs that save into one folder: the second is refused, while the first lives, and nothing is damaged."""
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from mpi_impl.checkpoints import checkpoint, folder_lock, on_disk
from mpi_impl.checkpoints.folder_lock import LOCK, HeldFolder, only_saver
from mpi_impl.checkpoints.on_disk import TRACKER, read_manifest
from reference.errors import UserError
from tests.checkpoints.saved_runs import ALONE, train_and_save
from tests.checkpoints.test_resumed_runs import OPTIONS, data  # noqa: F401  a fixture
from tests.launching import environment
from tests.program import pretrain, refusal

HOLD = """\
import sys
from mpi_impl.checkpoints.folder_lock import only_saver
with only_saver(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Start another process that holds the lock of tmp_path, which a killed run has left something in."""
    (tmp_path / "iter_0000001.1f09ab7c.tmp").mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], env=environment(), stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_until_the_first_is_killed(ranks, holder, data, tmp_path):  # noqa: F811
    """On all ranks, with the holder's process and host; then the same run goes on."""
    options = [*OPTIONS, *data, "--train-iters", "1", "--save", str(tmp_path)]
    said, _ = ranks.run(2, refusal, pretrain, options)
    assert f"process {holder.pid} on {os.uname().nodename}, since 20" in said
    assert os.listdir(tmp_path) == [LOCK]
    holder.send_signal(signal.SIGKILL)
    assert ranks.run(2, refusal, pretrain, options) == ["", ""]
    assert read_manifest(str(tmp_path)).iteration == 1


def test_a_folder_that_another_run_saves_into_can_be_loaded(ranks, data, tmp_path):  # noqa: F811
    options = [*OPTIONS, *data, "--save"]
    ranks.run(1, pretrain, [*options, str(tmp_path / "D"), "--train-iters", "1"])
    with only_saver(str(tmp_path / "D")):
        ranks.run(1, pretrain, [*options, str(tmp_path / "E"), "--train-iters", "2", "--load", str(tmp_path / "D")])
    assert read_manifest(str(tmp_path / "E")).iteration == 2


def save_while_another_does(group, run, root) -> None:
    """Save, while another run saves the same iteration: it begins later, and has ended before."""
    write_manifest, others = checkpoint.write_manifest, []

    def late(*args):
        if not others:
            others.append(True)
            train_and_save(group, run, root)
        return write_manifest(*args)

    checkpoint.write_manifest = late
    try:
        train_and_save(group, run, root)
    finally:
        checkpoint.write_manifest = write_manifest


def test_two_runs_where_folders_cannot_be_locked(ranks, tmp_path, monkeypatch):
    """The one that ends later is refused, and neither touches what the other has not finished."""
    (tmp_path / "iter_0000001.1f09ab7c.tmp").mkdir()

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        notes = []
        with only_saver(str(tmp_path), notes.append):
            assert str(tmp_path) in notes[0] and "No locks available" in notes[0]
    (said,) = ranks.run(1, refusal, save_while_another_does, ALONE, tmp_path)
    assert f"--save {tmp_path} holds a checkpoint of iteration 1" in said
    manifest = read_manifest(str(tmp_path))
    for name in manifest.files:
        on_disk.check_file(str(tmp_path), name, manifest)
    assert [path.name for path in tmp_path.glob("*.tmp")] == ["iter_0000001.1f09ab7c.tmp"]


def test_odd_things_in_the_place_of_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "SECONDS_TO_END", 0)
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(UserError, match="a link to nowhere, a pipe or a device"), only_saver(str(tmp_path)):
        pass
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).write_bytes(b"\xff" * 10_000)
    with only_saver(str(tmp_path)), pytest.raises(UserError, match="in use"), only_saver(str(tmp_path)):
        pass


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_is_a_link_is_refused_and_its_file_stays(tmp_path, link):
    (tmp_path / "precious").write_text("words")
    link(tmp_path / "precious", tmp_path / LOCK)
    with pytest.raises(UserError, match=f"{LOCK} is a link"), only_saver(str(tmp_path)):
        pass
    assert (tmp_path / "precious").read_text() == "words"


def test_no_file_of_a_run_is_written_through_a_link(ranks, data, tmp_path):  # noqa: F811
    """An output replaces a link in its place, and the file that the link leads to stays as it was."""
    for name in "DR":
        os.mkdir(tmp_path / name)
    links = [tmp_path / name for name in (
        "metrics", "ledger", "report.html", "D/tokenizer.json", f"D/{TRACKER}.tmp",
        "R/iteration-1.rank-0.safetensors")]
    targets = [tmp_path / f"precious-{i}" for i in range(len(links))]
    for link, target in zip(links, targets):
        target.write_text("words")
        link.symlink_to(target)
    options = [f"--save={tmp_path}/D", f"--record={tmp_path}/R", f"--metrics-file={links[0]}", f"--ledger={links[1]}",
               f"--report={links[2]}"]
    ranks.run(1, pretrain, [*OPTIONS, *data, "--train-iters", "1", *options])
    assert {target.read_text() for target in targets} == {"words"} and not any(map(Path.is_symlink, links))


def pretrain_and_change(group, options, change) -> str:
    """Change the folder of --save before the second checkpoint, and return why the run ends."""
    place, saved = HeldFolder.place, []

    def changed(folder):
        if saved:
            change(folder.root)
        saved.append(folder)
        return place(folder)

    with mock.patch.object(HeldFolder, "place", changed):
        return refusal(group, pretrain, options)


def move(root) -> None:
    os.rename(root, f"{root}-moved")


def move_and_make_anew(root) -> None:
    move(root)
    os.mkdir(root)


@pytest.mark.parametrize("change, where", [(move, "D-moved"), (move_and_make_anew, "D-moved"), (shutil.rmtree, "D")])
def test_a_run_whose_folder_is_moved_saves_its_state_and_ends(ranks, data, tmp_path, change, where):  # noqa: F811
    """In the folder that it has locked, wherever that is now: nothing is saved into one that another run may hold."""
    options = [*OPTIONS, *data, "--train-iters", "4", "--save-interval", "1", "--save", str(tmp_path / "D")]
    said, _ = ranks.run(2, pretrain_and_change, options, change)
    assert f"--load {tmp_path}/{where} --save {tmp_path}/{where}" in said
    assert read_manifest(str(tmp_path / where)).iteration == 2
    assert where == "D" or not list(tmp_path.glob("D/*"))


def test_a_folder_that_another_run_has_taken_is_left_to_it(tmp_path):
    with only_saver(str(tmp_path)) as folder:
        os.remove(tmp_path / LOCK)
        with only_saver(str(tmp_path)), pytest.raises(UserError, match=f"--save {tmp_path} was replaced"):
            folder.place()
