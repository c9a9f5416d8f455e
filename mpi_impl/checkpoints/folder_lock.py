"""The lock on a folder of checkpoints: one run at a time may save there.

It is the system's lock on a file in the folder, and ends with the process that holds it, however that ends: a run that
is requeued finds the folder free. NFS, and parallel file systems that are mounted with locks, let other hosts see it.
The file stays, and says who holds it, or has held it last. Loading needs no lock: what is complete does not change.
"""
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from mpi_impl.runtime.files import check_writable, writing
from reference.errors import UserError

LOCK = "run.lock"
SECONDS_TO_END = 2      # that the last run's process gets, if it was killed a moment ago


@contextmanager
def only_saver(root: str) -> Iterator[str]:
    """Hold the lock of a folder that exists, and remove what killed runs have left there unfinished.

    Yields a note if the file system has no locks, and else "". Raises UserError if another run holds the lock.
    """
    path = os.path.join(root, LOCK)
    check_writable(path)
    with open(path, "a+", encoding="utf-8", errors="replace") as file:
        note = take_lock(file, root)
        if not note:
            with writing(path):
                name_holder(file)
            remove_unfinished(root)
        yield note


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
