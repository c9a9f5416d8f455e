"""The lock on a folder of checkpoints: one run at a time may save there.

It is the system's lock on a file in the folder, and ends with the process that holds it, however that ends: a run that
is requeued finds the folder free. NFS, and parallel file systems that are mounted with locks, let other hosts see it.
The file stays, and says who holds it, or has held it last. Loading needs no lock: what is complete does not change.
The lock moves with its folder: a run whose folder was moved finds it by the lock, saves there once more, and ends.
"""
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TextIO

from mpi_impl.checkpoints import on_disk
from mpi_impl.runtime.files import check_writable, without_following, writing
from reference.errors import UserError

LOCK = "run.lock"
SECONDS_TO_END = 2      # that the last run's process gets, if it was killed a moment ago


class HeldFolder(NamedTuple):
    """A folder into which only this run saves, and the file that it has locked there."""

    root: str
    file: TextIO

    def place(self) -> tuple[str, str]:
        """Return the folder to save into now, and a sentence on why the run must then end: "" if --save still names it.

        Raises UserError if another run may have taken its place.
        """
        if self.is_at(self.root):
            return self.root, ""
        now = self.root
        with suppress(OSError):     # a system without Linux's /proc does not tell where the folder is now
            now = os.path.dirname(os.readlink(f"/proc/self/fd/{self.file.fileno()}"))
        root, fate = (now, f"moved to {now}") if self.is_at(now) else (self.root, "removed")
        if root == self.root and os.path.lexists(os.path.join(root, LOCK)):
            raise UserError(f"--save {root} was replaced while this run saved into it, and another run holds the new "
                            "one: nothing more is saved there. Start again with another folder.")
        return root, (f"--save {self.root} was {fate} while this run saved into it, so the run ends. Its last "
                      f"checkpoint is saved: resume with --load {root} --save {root}.")

    def is_at(self, root: str) -> bool:
        """Report whether the lock that this run holds is in this folder."""
        lock = os.path.join(root, LOCK)
        return os.path.exists(lock) and os.path.samestat(os.stat(lock), os.fstat(self.file.fileno()))


@contextmanager
def only_saver(root: str, say: Callable[[str], None] = lambda note: None) -> Iterator[HeldFolder]:
    """Hold the lock of a folder that exists, and finish or remove what killed runs have left there.

    Says so if the file system has no locks. Raises UserError if another run holds the lock, and if that is a link.
    """
    path = os.path.join(root, LOCK)
    with open_lock(path) as file:
        if note := take_lock(file, root):
            say(note)
        else:
            with writing(path):
                name_holder(file)
            on_disk.finish(root)
            remove_unfinished(root)
        yield HeldFolder(root, file)


def open_lock(path: str) -> TextIO:
    """Open the lock's file. Raise UserError for a link, symbolic or hard: what it leads to is not ours to write."""
    check_writable(path)
    if os.path.lexists(path) and (os.path.islink(path) or os.stat(path).st_nlink > 1):
        raise UserError(f"{path} is a link, and the file that it leads to would be overwritten. Remove the link.")
    with writing(path):
        return open(path, "a+", encoding="utf-8", errors="replace", opener=without_following)


def take_lock(file: TextIO, root: str) -> str:
    """Lock this open file. Return a note if the file system cannot do that. Raise UserError if another run has."""
    deadline = time.monotonic() + SECONDS_TO_END
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return ""
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                file.seek(0)
                raise UserError(f"--save {root} is in use by {file.read(300).strip() or 'another run'}. Wait until it "
                                "has ended, or choose another folder.") from error
        except OSError as error:
            return (f"note: {root} cannot be locked ({error.strerror}), so that no second run would be refused there: "
                    "start none that saves into it")
        time.sleep(0.1)


def name_holder(file: TextIO) -> None:
    """Write this process into the file, for a run that is refused."""
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()


def remove_unfinished(root: str) -> None:
    """Remove the checkpoints that killed runs have begun. A rank of theirs that is about to die may hinder that."""
    with writing(root):
        for name in filter(re.compile(r"iter_\d+\.\w+\.tmp").fullmatch, os.listdir(root)):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
