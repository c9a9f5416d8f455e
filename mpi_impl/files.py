"""Files of a run: whether those that it writes can be written is found out before the work. Errors are sentences."""
import os
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import TextIO

from reference.errors import UserError

PICTURES = (".png", ".pdf", ".svg")      # what a file's name may end in


def open_for_writing(path: str) -> TextIO:
    """An emptied file. Raises UserError if it cannot be written."""
    with writing(path):
        return open(path, "w")


@contextmanager
def writing(path: str):
    """What goes wrong with the file inside the `with` block is a UserError that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


@contextmanager
def reading(path: str):
    """The same for a file that is read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def check_writable(path: str, read: str | None, option: str = "--data-path") -> None:
    """Raises UserError if the file cannot be written, or is what an option reads. What is in it stays."""
    if read and os.path.exists(path) and os.path.exists(read) and os.path.samefile(path, read):
        raise UserError(f"{path} is what {option} reads: give what is written another name.")
    if read and os.path.isdir(read) and os.path.exists(path) and (
            os.path.realpath(path).startswith(os.path.join(os.path.realpath(read), ""))):
        raise UserError(f"{path} is a file of {option} {read}: give what is written another name.")
    with writing(path):
        open(path, "a").close()


def check_picture(path: str, option: str = "--plot") -> None:
    """Raises UserError if it is no name of a picture, or cannot be written."""
    if not path.endswith(PICTURES):
        raise UserError(f"{option} is {path!r}, but must be a file that ends in {', '.join(PICTURES)}.")
    check_writable(path, None)


def check_folder(path: str) -> None:
    """The folder is made if it is not there. Raises UserError if it cannot be, or nothing can be written in it."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise UserError(f"{path} is a file, where a folder is needed: give another name.")
    with writing(path):
        os.makedirs(path, exist_ok=True)
        TemporaryFile(dir=path).close()
