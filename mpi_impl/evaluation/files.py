"""A reader of published files, with a sentence about each fault."""
import json
from pathlib import Path

from mpi_impl.data.corpus import kind
from mpi_impl.runtime import files
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


def json_object(text: str, where: str, like: str) -> dict:
    """Parse a text as a JSON object. Raise UserError for anything else; `like` is an example."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode("utf-8")   # JSON can spell half a surrogate pair, which is no text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON text ({type(error).__name__}). It should read like {like}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is JSON, but not an object. It should read like {like}.")
    return value
