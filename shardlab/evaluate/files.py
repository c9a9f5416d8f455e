"""Readers of published files, with a sentence about each fault."""
from pathlib import Path

import msgspec

from mpi_impl.data.corpus import kind
from mpi_impl.runtime import files
from mpi_impl.runtime.formats import Content, decoding
from reference.errors import UserError


def read_text(path: str | Path, wanted: str) -> str:
    """Return a file's text, line ends and all. `wanted` describes the right file, for a user who gave another.

    Raises UserError for a file that is missing, not a file, not readable, not UTF-8 or without a single word.
    """
    if kind("--data-path", str(path)) != "file":
        raise UserError(f"--data-path leads to {path}, and there is no such file. Give the path of {wanted}.")
    text = files.read_text(str(path))
    if not text.strip():
        raise UserError(f"{path} is empty. Give the path of {wanted}.")
    return text


def parse(text: str, kind: type[Content], where: str, like: str) -> Content:
    """Parse a JSON text as a value of this type. Raise UserError for anything else; `like` is an example."""
    try:
        with decoding(where, "JSON"):
            return msgspec.json.decode(text, type=kind)
    except UserError as error:
        raise UserError(f"{error} It should read like {like}.") from error
