"""The texts to learn from: a text file, a folder, JSON lines, or the source of Python's own standard library.

The beginning of a file tells how it holds documents, since the tools that write them choose names of their own:

    {"text": "one"}                 JSON lines, as Megatron reads them and `WikiExtractor --json` writes them (wiki_00);
    {"text": "two"}                 a name such as a.jsonl says the same
    [{"text": "one"}, ...]          JSON: an array of documents, or an object that is one, on any number of lines
    <doc id="1" ...> ... </doc>     WikiExtractor's articles
    anything else                   a text, which is one document

A file that begins with another JSON object, or is named a.json and is not JSON, holds no documents: a model would learn
the JSON itself. A byte-order mark is not text.
"""
import codecs
import errno
import json
import os
import platform
import re
import stat
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NoReturn

from mpi_impl.runtime.files import LARGEST, opened_to_read, read_bytes
from mpi_impl.runtime.tables import count
from reference.errors import UserError

BAD_KINDS = BAD_BYTES, BAD_JSON, BAD_ARTICLES, EMPTY, TOO_LONG = (
    "bad bytes", "bad JSON", "bad articles", "empty", "too long")
FIRST_LINE = 1 << 26        # bytes that may be read to see whether it is JSON
JSON_LINES = {".jsonl", ".jsonlines", ".ndjson"}
ARTICLE = re.compile(r"<doc id=[^\n]*>\n(.*?)\n*</doc>\s*", re.DOTALL)
NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
GENERATED = {"encodings", "pydoc_data", "entities.py", "_casefix.py", "stringprep.py"}     # tables rather than programs


class BadText(Exception):
    """An error in bytes that are not text: its kind, and its description, which follows the name of the file."""

    def __init__(self, kind: str, fault: str):
        super().__init__(fault)
        self.kind, self.fault = kind, fault


class Corpus:
    """The files of a corpus, in a fixed order, and their texts.

    `data_path`, which `option` gives, is one of

      - a file, in one of the forms above;
      - a folder: every file in it, sorted, without hidden files and folders and without the folder `leave_out` (the
        cache); a file that is not UTF-8 text, or holds no documents, is skipped and listed in `skipped`;
      - None: the source of the running Python's standard library, which every machine has.

    Raises UserError if the path is missing, cannot be looked up or leads to no file, and if a folder below it cannot be
    read.
    """

    def __init__(self, data_path: str | None, leave_out: Path | None = None, option: str = "--data-path"):
        if data_path == "":
            raise UserError(f"{option} is empty, so it names nothing. Give a path, or leave the option out to take the "
                            "standard library of this Python.")
        self.name = data_path or f"the standard library of Python {platform.python_version()}"
        self.option = option
        self.files = text_files(option, data_path, leave_out) if data_path else standard_library_files(option)
        self.is_folder = data_path is None or kind(option, data_path) == "folder"
        self.skipped: dict[Path, str] = {}  # by the latest pass of documents(), and why

    def __str__(self) -> str:
        size = sum(file.stat().st_size for file in self.files)
        amount = f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size:,} bytes"
        return f"{self.name} ({count(len(self.files), 'file')}, {amount})"

    def documents(self) -> Iterator[str]:
        """Yield the texts, one at a time and always in the same order, without empty ones.

        Raises UserError for a file that cannot be read, a single file that is not text, a line that is not JSON or
        lacks its text (with the number of the line), and a corpus without a single character.
        """
        self.skipped, empty = {}, True
        for text in filter(None, chain.from_iterable(map(self.texts_of, self.files))):
            empty = False
            yield text
        if empty:
            why = "".join(f" {file} {fault}." for file, fault in [*self.skipped.items()][:1])
            raise UserError(f"The corpus is empty: there is no text in {self.name}.{why} Give another {self.option}.")

    def texts_of(self, file: Path) -> Iterator[str]:
        try:
            if is_json_lines(file):
                yield from json_lines(file)
            else:
                yield from texts_in(read_bytes(str(file)), file.suffix)
        except BadText as bad:
            if not self.is_folder:
                raise UserError(f"{file} {bad.fault}. Give another {self.option}.") from bad
            self.skipped[file] = bad.fault


def kind(option: str, path: str) -> str:
    """Return the kind of the option's path: 'file', 'folder', 'other' or 'nothing'. Raise UserError if unknown."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte, which no path has
        return "nothing"
    except OSError as error:
        raise UserError(f"{option} {path} cannot be looked up ({error.strerror}). Check the path, and that you may "
                        "enter each folder on the way.") from error
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def text_files(option: str, path: str, leave_out: Path | None) -> list[Path]:
    found = kind(option, path)
    if found == "file":
        return [Path(path)]
    if found == "other":
        raise UserError(f"{option} {path} is a device or a pipe, neither a file nor a folder, and can be read only "
                        "once. Copy its text into a file.")
    if found == "nothing":
        prefix = ", or the prefix of a Megatron .bin/.idx pair" if option == "--data-path" else ""
        raise UserError(f"{option} {path} does not exist. Give a text file, a folder of text files, JSON "
                        f"lines{prefix}; or leave it out to take the standard library of this Python.")
    files = files_under(option, Path(path), lambda name: not name.startswith("."), leave_out)   # such as .git
    if not files:
        raise UserError(f"The corpus is empty: there is no file in the folder {path}. Give another {option}.")
    return files


def standard_library_files(option: str) -> list[Path]:
    """Return the .py files of the running Python, without its tests, its generated tables and installed packages.

    They are in the order of a hash of their names: the last ones, which become validation data, are a sample of all.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = files_under(option, root, lambda name: name not in NOT_THE_LIBRARY | GENERATED)
    sources = [file for file in files if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")]
    if not sources:
        raise UserError(f"This Python has no source of its standard library under {root}. Give a {option}.")
    return sorted(sources, key=lambda file: sha256(file.relative_to(root).as_posix().encode()).digest())


def files_under(option: str, root: Path, wanted: Callable[[str], bool], leave_out: Path | None = None) -> list[Path]:
    """Return all files below a folder, sorted, without unwanted names (files or folders) and `leave_out`.

    Raises UserError for a folder that cannot be read: to go on without it would silently train on less.
    """

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}). Check that you may read it and enter its "
                        f"folder, or give a {option} without it.") from error

    found = []
    left_out = leave_out and os.path.realpath(leave_out)
    try:
        for folder, subfolders, names in os.walk(root, onerror=refuse):
            # os.walk does not enter folders that are removed here.
            subfolders[:] = [name for name in filter(wanted, subfolders)
                             if os.path.realpath(Path(folder, name)) != left_out]
            found += [Path(folder, name) for name in filter(wanted, names)]
        return sorted(filter(is_file, found))
    except OSError as error:
        refuse(error)


def is_file(path: Path) -> bool:
    """Report whether it is a file, or leads to one. Raises OSError where Path.is_file says no since Python 3.14: if the
    folder may not be entered.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):      # a link to nowhere, or to itself
            return False
        raise


# ---- from bytes to texts ---------------------------------------------------------------------------------------------


def text_of_file(data: bytes) -> str:
    """Return UTF-8 text, line ends and all. Raise BadText for a zero byte, too: it marks a binary file."""
    try:
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise BadText(BAD_BYTES, "is UTF-16, not UTF-8: convert it, as iconv does")
        if b"\x00" in data:
            raise BadText(BAD_BYTES, "is not UTF-8 text (it holds a zero byte)")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadText(BAD_BYTES, f"is not UTF-8 text ({error.reason})") from error


def texts_in(data: bytes, suffix: str = ".json") -> list[str]:
    """Return the documents of a file, or of a line of JSON lines. Raise BadText if it is not text, or holds none."""
    text = text_of_file(data)
    if text.startswith("<doc id="):
        if ARTICLE.sub("", text):
            raise BadText(BAD_ARTICLES, "begins with an article of WikiExtractor, <doc id=...>, and does not go on so")
        return ARTICLE.findall(text)
    try:
        value, end = json.JSONDecoder().raw_decode(text.strip())
    except (ValueError, RecursionError):
        value, end = None, 0
    values = value if isinstance(value, list) else [value]
    if suffix != ".json" and not (values and all(value and isinstance(value, dict) for value in values)):
        return [text]
    try:
        texts = [value["text"] for value in values]
        "".join(texts).encode("utf-8")      # JSON can spell half a surrogate pair, which is not text
    except (ValueError, TypeError, KeyError):
        texts = []
    if end < len(text.strip()) or not texts:
        raise BadText(BAD_JSON, 'is not JSON with objects that have a string under the key "text"')
    return texts


def is_json_lines(file: Path) -> bool:
    """Report whether each line of a file has documents, by its name or first line. Raise UserError if unreadable."""
    with opened_to_read(str(file)) as lines, suppress(BadText):
        return bool(texts_in(lines.readline(FIRST_LINE)))
    return file.suffix in JSON_LINES


def json_lines(file: Path) -> Iterator[str]:
    with opened_to_read(str(file)) as lines:
        for number, line in enumerate(iter(partial(lines.readline, LARGEST), b""), start=1):
            if line.isspace():
                continue
            try:
                if len(line) == LARGEST:
                    raise BadText(TOO_LONG, f"is longer than {LARGEST >> 20} MiB")
                texts = texts_in(line)
            except BadText as bad:
                raise UserError(f'{file}, line {number}, {bad.fault}. Correct the line: each one should read like '
                                '{"text": "a document"}.') from bad
            yield from texts
