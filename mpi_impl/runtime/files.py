"""The files of a run. Whatever can be wrong with one is found out before the work, and said in a sentence.

Only regular files are read and written: a pipe can be read once, and a program that opens one may wait forever; a
device such as /dev/zero never ends.
"""
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TextIO
from uuid import uuid4

import xxhash

from mpi_impl.runtime.advice import check_installed
from reference.errors import UserError

PICTURES = (".png", ".pdf", ".svg")      # what a picture's name may end in
DEEPEST = 200                            # folders in one another; systems allow a path of 4,096 bytes
LARGEST = 1 << 30                        # bytes of a file that is read into memory whole, where nothing else is said
ASIDE = ".shardlab-unfinished-"          # how the names of folders begin that hold what is not whole
YOUNG = 60                               # seconds for which such a folder may be without its lock


# ---- read -----------------------------------------------------------------------------------------------------------


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what goes wrong with the file inside the `with` block into a UserError that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


@contextmanager
def opened_to_read(path: str, largest: int | None = None, links: bool = True) -> Iterator[BufferedReader]:
    """Open a regular file; without `links`, no link to one. Raises UserError for anything else, for more than `largest`
    bytes, and for what goes wrong while it is read.
    """
    with reading(path), open(path, "rb", opener=without_waiting if links else without_following) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} cannot be read: it is a pipe or a device, and no file. Give the name of a file.")
        if largest is not None and found.st_size > largest:
            raise UserError(f"{path} has {found.st_size:,} bytes, but a file of its kind has at most {largest:,}. Give "
                            "another one.")
        yield file


def without_waiting(path: str, flags: int) -> int:
    """Open a path without waiting, even a pipe into which nobody writes."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def without_following(path: str, flags: int) -> int:
    """Open a path without waiting, unless it is a link."""
    return without_waiting(path, flags | os.O_NOFOLLOW)


def check_readable(path: str, largest: int | None = None) -> None:
    """Check a file for libraries that open it themselves and say less.

    Raises UserError unless it is a regular file, of at most `largest` bytes.
    """
    with opened_to_read(path, largest):
        pass


def read_bytes(path: str, largest: int = LARGEST) -> bytes:
    """Read a whole file. Raises UserError if it has more than `largest` bytes: it is not what it should be."""
    with opened_to_read(path, largest) as file:
        return file.read()


def read_text(path: str, largest: int = LARGEST) -> str:
    """Read a whole file of UTF-8, without a byte-order mark. Raises UserError for other files."""
    try:
        return read_bytes(path, largest).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}).") from error


def checksum(path: str) -> str:
    """Return the checksum of a file's content, as `xxh128sum` prints it. Raises UserError if it cannot be read."""
    with opened_to_read(path) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def is_there(path: str) -> bool:
    """Report whether there is a file or folder of this name. Raises UserError in a locked folder."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f"{path} cannot be looked up: {error.strerror}. Check that you may enter each folder on the "
                        "way.") from error
    return True


def path_inside(folder: str, name: str, source: str) -> str:
    """Return the path of a file in a folder, by the name that the file `source` gives it.

    Raises UserError for a name that could lead out of the folder.
    """
    if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
        raise UserError(f"{source} names the file {name!r}, but a file next to it has a name without a folder.")
    return os.path.join(folder, name)


# ---- written --------------------------------------------------------------------------------------------------------


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Turn what goes wrong with the file inside the `with` block into a UserError that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


@contextmanager
def replacing(path: str) -> Iterator[str]:
    """Hand out the name of a file to write, which becomes `path` when the block has ended, and disappears if it fails.

    So whoever finds `path` finds a whole file: the new one, or the one that was there before. A link is replaced, and
    what it leads to stays. Raises UserError.
    """
    check_kind(path)
    with writing(path):
        aside = new_file_beside(path)
        try:
            if os.path.exists(path):
                shutil.copymode(path, aside)
            yield aside
            os.replace(aside, path)
        finally:
            with suppress(FileNotFoundError):
                os.remove(aside)


def new_file_beside(path: str) -> str:
    """Make an empty file in the same folder, with the same ending, under a name that nobody else uses."""
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f"unfinished-{uuid4().hex[:12]}{os.path.splitext(name)[1]}")
    open(aside, "xb").close()
    return aside


@contextmanager
def folder_aside(parent: str) -> Iterator[str]:
    """Hand out a new folder for what is not whole yet, or not any more; it is removed when the block has ended.

    What programs that were killed have left of theirs is removed, too.
    """
    for name in filter(re.compile(rf"{re.escape(ASIDE)}[a-z0-9_]{{8}}").fullmatch, os.listdir(parent)):
        remove_abandoned(os.path.join(parent, name))
    with TemporaryDirectory(dir=parent, prefix=ASIDE) as folder, ExitStack() as held:
        with suppress(OSError):      # where there are no locks, nobody gets one, and such folders stay
            held.enter_context(locked(folder))
        yield folder


def remove_abandoned(folder: str) -> None:
    """Remove a folder of `folder_aside`, unless the program that has made it lives, or may be about to lock it."""
    with suppress(OSError):
        if time.time() - os.stat(folder).st_mtime > YOUNG:
            with locked(folder):
                shutil.rmtree(folder)


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold the folder's lock, which ends with this process. Raises OSError if somebody else has it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def write_whole(path: str, text: str) -> None:
    """Write a file so that it is there whole or not at all. Raises UserError."""
    with replacing(path) as aside, open(aside, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def open_for_writing(path: str, begins: str = "") -> TextIO:
    """Open a file that begins with this text, for lines that are to be read while it grows. Raises UserError."""
    check_writable(path)
    write_whole(path, begins)
    with writing(path):
        return open(path, "a", encoding="utf-8", newline="\n")


def check_writable(path: str) -> None:
    """Raise UserError unless a file of this name can be written, directly or aside. What it holds stays."""
    check_name(path)
    check_kind(path)
    with writing(path):
        with suppress(FileNotFoundError):
            os.lstat(path)      # raises if the name is too long, or a folder on the way is none
        if os.path.exists(path):
            open(path, "ab").close()
        os.remove(new_file_beside(path))


def check_kind(path: str) -> None:
    """Raise UserError if something of this name is neither a file nor a link to one: it must not be replaced."""
    if os.path.lexists(path) and not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "a link to nowhere, a pipe or a device"
        raise UserError(f"{path} cannot be written: it is {what}. Give the name of a file.")


def check_ending(path: str, option: str = "--plot", endings: tuple[str, ...] = PICTURES) -> None:
    """Raise UserError if it is no name of a picture, or of a page, or cannot be written."""
    if not path.endswith(endings):
        raise UserError(f"{option} is {path!r}, but must be a file that ends in {', '.join(endings)}.")
    if endings is PICTURES:
        check_installed("matplotlib", option)
    check_writable(path)


def check_folder(path: str) -> None:
    """Make the folder if it is not there. Raises UserError if it cannot be made, or nothing can be written in it."""
    check_name(path)
    if os.path.exists(path) and not os.path.isdir(path):
        raise UserError(f"{path} is a file, where a folder is needed: give another name.")
    with writing(path):
        os.makedirs(path, exist_ok=True)
        TemporaryFile(dir=path).close()


def check_name(path: str) -> None:
    """Raise UserError for a name that some library would refuse in the end, when what is to be written is lost."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{path!r} cannot be written: its name is not UTF-8. Give another name.") from error
    if "\0" in path:
        raise UserError(f"{path!r} cannot be written: no name has a zero byte. Give another name.")
    if (depth := os.path.abspath(path).count(os.sep)) > DEEPEST:
        raise UserError(f"A path of {depth:,} folders in one another is too deep to be written: {DEEPEST} are the "
                        f"limit. It begins with {path[:40]}.")
