"""A corpus in chunks: pieces of work of about one size, made without reading it, and the documents of each.

A chunk is a list of parts, each a range of bytes of one file. A part of JSON lines has the lines that begin in the
range; any other file is in one part as a whole. So the chunks have every document once and in order, wherever the
boundaries are.
"""
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mpi_impl.data.corpus import EMPTY, TOO_LONG, BadText, Corpus, is_json_lines, texts_in
from mpi_impl.data.encode import group_by_size
from mpi_impl.data.prepare.clean import normalize
from reference.errors import UserError

LARGEST = 1 << 28   # bytes of a document: it is held in memory, several times over, with its tokens


class Source(NamedTuple):
    """A file of the corpus; its size and the time when it last changed stand for its contents.

    That is the inode's own time (ctime): no tool that copies or unpacks files sets it back.
    """

    file: str
    is_json_lines: bool
    size: int
    ctime_ns: int


class Part(NamedTuple):
    """The bytes of a file from `start` up to and without `stop`."""

    file: str
    is_json_lines: bool
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Document(NamedTuple):
    """A document found in a part: its line or, if the file has several documents of other forms, its number, counted
    from 1 (0 for a whole file); and its text, or why it has none.
    """

    line: int
    text: str
    bad: BadText | None


def sources(inputs: Iterable[str | None], option: str) -> list[Source]:
    """Return the files of all inputs, each a corpus that the option gives, in order. Raise UserError as Corpus does."""
    found = []
    for path in inputs:
        for file in Corpus(path, option=option).files:
            status = file.stat()
            found.append(Source(str(file), is_json_lines(file), status.st_size, status.st_ctime_ns))
    return found


def chunks(files: Iterable[Source], size: int) -> Iterator[list[Part]]:
    """Yield the files as lists of parts, of `size` bytes together or more if a document is larger."""
    return group_by_size(split_into_parts(files, size), lambda part: part.size, size)


def split_into_parts(files: Iterable[Source], size: int) -> Iterator[Part]:
    for source in files:
        step = size if source.is_json_lines else max(1, source.size)
        for start in range(0, max(1, source.size), step):   # an empty file has a part, so that it is reported as empty
            yield Part(source.file, source.is_json_lines, start, min(source.size, start + step))


def documents(part: Part) -> Iterator[Document]:
    """Yield the normalized documents of a part. One line or file is in memory at a time. A blank line is not bad.

    Raises UserError for a file that cannot be read.
    """
    try:
        with open(part.file, "rb") as file:
            if part.stop == 0:
                yield Document(0, "", BadText(EMPTY, "is an empty file"))
            elif part.is_json_lines:
                for number, line in enumerate(read_lines(file, part), start=1):
                    yield from parse(line, line=number)
            else:
                yield from parse(file.read() if part.stop <= LARGEST else None, Path(part.file).suffix)
    except OSError as error:
        raise UserError(f"{part.file} cannot be read ({error.strerror}). Check that you may read it.") from error


def parse(data: bytes | None, suffix: str = ".json", line: int = 0) -> Iterator[Document]:
    """Yield the documents of a line, or of a whole file; `data` is None if it is too long."""
    if data is None:
        yield Document(line, "", BadText(TOO_LONG, f"is longer than {LARGEST >> 20} MiB"))
    elif line and data.isspace():
        yield Document(line, "", None)
    else:
        try:
            texts = list(map(normalize, texts_in(data, suffix)))
        except BadText as bad:
            yield Document(line, "", bad)
            return
        for number, text in enumerate(texts, start=1):
            yield Document(line or (number if texts[1:] else 0), text, None if text else BadText(EMPTY, "has no text"))


def read_lines(file: BinaryIO, part: Part) -> Iterator[bytes | None]:
    """Yield the lines that begin in the part; None for one that is too long."""
    position = part.start
    if position:    # a line that began before does not belong to this part, unless it ends just here
        file.seek(position - 1)
        position += skip_line(file) - 1
    while position < part.stop and (line := file.readline(LARGEST)):
        position += len(line)
        if len(line) == LARGEST and not line.endswith(b"\n"):
            position += skip_line(file)
            yield None
        else:
            yield line


def skip_line(file: BinaryIO) -> int:
    """Go on to the next line, and return the number of bytes skipped."""
    skipped = 0
    while piece := file.readline(1 << 20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
