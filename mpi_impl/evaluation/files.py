"""Files that others have published: read as they are, or refused with a sentence that says what is wrong with them."""
import json
from pathlib import Path

from mpi_impl.data.corpus import kind
from mpi_impl.runtime import files
from reference.errors import UserError


def read_text(path: str | Path, wanted: str) -> str:
    """A file's text, line ends and all. `wanted` says what the file should be, for the person who gave another.

    Raises UserError for what is not there, not a file, not readable, not UTF-8 or without a single word.
    """
    if kind("--data-path", str(path)) != "file":
        raise UserError(f"--data-path leads to {path}, and there is no such file. Give the path of {wanted}.")
    text = files.read_text(str(path))
    if not text.strip():
        raise UserError(f"{path} is empty. Give the path of {wanted}.")
    return text


def json_object(text: str, where: str, like: str) -> dict:
    """The JSON object that a text spells. Raises UserError for anything else; `like` shows how one reads."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode("utf-8")   # JSON can spell half a surrogate pair, which is no text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON text ({type(error).__name__}). It should read like {like}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is JSON, but no object. It should read like {like}.")
    return value
