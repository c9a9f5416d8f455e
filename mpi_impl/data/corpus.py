"""The texts to learn from: a text file, a folder, JSON lines, or the source of Python's own standard library."""
import json
import os
import platform
import stat
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from reference.errors import UserError

NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Corpus:
    """The files of a corpus, in a fixed order, and their texts.

    `data_path` is one of
      - a text file: one document;
      - a file ending in .jsonl or .json: JSON lines, each an object whose key "text" is a document;
      - a folder: every file in it, sorted, without hidden files and folders and without the folder `leave_out` (the
        cache, which is no text of ours); a .jsonl file is read as JSON lines, a file that is not UTF-8 text is passed
        over and listed in `skipped`;
      - None: the source of the running Python's standard library, which every machine has.

    Raises UserError if the path is missing, cannot be looked up or leads to no file, and if a folder below it cannot
    be read.
    """

    def __init__(self, data_path: str | None, leave_out: Path | None = None):
        if data_path == "":
            raise UserError(
                "--data-path is empty, which names nothing. Give a path, or leave the option out to train on the "
                "standard library of this Python."
            )
        self.name = data_path or f"the standard library of Python {platform.python_version()}"
        self.files = _text_files(data_path, leave_out) if data_path else _standard_library()
        self.is_folder = data_path is None or kind("--data-path", data_path) == "folder"
        self.skipped: list[Path] = []  # by the latest pass of documents()

    def __str__(self) -> str:
        size = sum(file.stat().st_size for file in self.files)
        amount = f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size:,} bytes"
        return f"{self.name} ({counted(len(self.files), 'file')}, {amount})"

    def documents(self) -> Iterator[str]:
        """The texts, one at a time and always in the same order; empty ones are left out.

        Raises UserError for a file that cannot be read, a single file that is not text, a line that is not JSON
        or lacks its text (with the number of the line), and a corpus without a single character.
        """
        self.skipped = []
        empty = True
        for file in self.files:
            for text in self._texts(file):
                if text:
                    empty = False
                    yield text
        if empty:
            raise UserError(f"The corpus is empty: there is no text in {self.name}. Give another --data-path.")

    def _texts(self, file: Path) -> Iterator[str]:
        try:
            if file.suffix == ".jsonl" or (file.suffix == ".json" and not self.is_folder):
                yield from _json_lines(file)
            else:
                yield _decode(file.read_bytes())
        except UnicodeDecodeError as error:
            if not self.is_folder:
                raise UserError(f"{file} is not UTF-8 text ({error.reason}). Give another --data-path.") from error
            self.skipped.append(file)
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}). Check that you may read it.") from error


def counted(n: int, noun: str) -> str:
    """'1 file', '2 files', '1,000 files'."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def kind(option: str, path: str) -> str:
    """What the option's path leads to: 'file', 'folder', 'other' or 'nothing'. Raises UserError if nobody can tell."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte, which no path has
        return "nothing"
    except OSError as error:
        raise UserError(
            f"{option} {path} cannot be looked up ({error.strerror}). Check the path, and that you may enter each "
            "folder on the way."
        ) from error
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def _text_files(path: str, leave_out: Path | None) -> list[Path]:
    found = kind("--data-path", path)
    if found == "file":
        return [Path(path)]
    if found == "other":
        raise UserError(f"--data-path {path} is neither a file nor a folder, but a device or a pipe, which can be read "
                        "once at most. Copy its text into a file.")
    if found == "nothing":
        raise UserError(
            f"--data-path {path} does not exist. Give a text file, a folder of text files, JSON lines, or the prefix "
            "of a Megatron .bin/.idx pair; or leave it out to train on the standard library of this Python."
        )
    files = _files_under(Path(path), lambda name: not name.startswith("."), leave_out)  # no text of ours: .git
    if not files:
        raise UserError(f"The corpus is empty: there is no file in the folder {path}. Give another --data-path.")
    return files


def _standard_library() -> list[Path]:
    """The .py files of the running Python, without its tests and what was installed beside them."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _files_under(root, lambda name: name not in NOT_THE_LIBRARY) if file.suffix == ".py"]
    if not files:
        raise UserError(f"This Python has no source of its standard library under {root}. Give a --data-path.")
    return files


def _files_under(root: Path, wanted: Callable[[str], bool], leave_out: Path | None = None) -> list[Path]:
    """All files below a folder, sorted, without the files and whole folders whose name is not wanted, and `leave_out`.

    Raises UserError for a folder that cannot be read: to go on without it would quietly train on less.
    """
    found = []
    left_out = leave_out and os.path.realpath(leave_out)
    try:
        for folder, subfolders, names in os.walk(root, onerror=_refuse):
            # what is taken out here is not walked
            subfolders[:] = [
                name for name in filter(wanted, subfolders) if os.path.realpath(Path(folder, name)) != left_out
            ]
            found += [Path(folder, name) for name in filter(wanted, names)]
        return sorted(file for file in found if file.is_file())
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise UserError(
        f"{error.filename} cannot be read ({error.strerror}). Check that you may read it and enter its folder, or give "
        "a --data-path without it."
    ) from error


def _decode(data: bytes) -> str:
    """UTF-8 text as it is, line ends and all. A zero byte decodes, but no text has one: it marks a binary file."""
    zero = data.find(b"\x00")
    if zero >= 0:
        raise UnicodeDecodeError("utf-8", data, zero, zero + 1, "it holds a zero byte")
    return data.decode("utf-8")


def _json_lines(file: Path) -> Iterator[str]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode("utf-8")  # JSON can spell half a surrogate pair, which is no text
            except RecursionError as error:
                raise UserError(f"{file}, line {number}, is nested too deeply to be read. Mend the line.") from error
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise UserError(
                    f'{file}, line {number}, is not a JSON object with a string under the key "text". '
                    'Mend the line; each one reads like {"text": "a document"}.'
                ) from error
            yield text
