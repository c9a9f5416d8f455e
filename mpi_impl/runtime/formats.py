"""Files in formats that hold data and cannot run as a program, as a pickle can: JSON, TOML and safetensors.

A type says what a file must hold, and `msgspec` compares the two: a number in place of a text, a field that is
missing, a list where there should be an object, an integer beyond 64 bits, or 100,000 brackets in one another are all
one UserError, which names the file and the place in it.
"""
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from mpi_impl.runtime.files import check_readable, read_bytes, read_text, reading
from reference.errors import UserError

Content = TypeVar("Content")

Object = dict[str, Any]
LARGEST_SETTINGS = 1 << 20     # bytes of a file that a person may have written: a model's sizes, a machine's figures
LARGEST_TOML = 1 << 14         # the same in TOML, whose parser takes time that is quadratic in the length of a name


def read_json(path: str, kind: type[Content], largest: int = LARGEST_SETTINGS) -> Content:
    """Read a JSON file that holds a value of this type. Raises UserError for any other."""
    text = read_bytes(path, largest).removeprefix(b"\xef\xbb\xbf")
    with decoding(path, "JSON"):
        return msgspec.json.decode(text, type=kind)


def read_toml(path: str, kind: type[Content]) -> Content:
    """Read a TOML file that holds a value of this type. Raises UserError for any other."""
    text = read_text(path, LARGEST_TOML)
    with decoding(path, "TOML"):
        return msgspec.convert(tomllib.loads(text), kind)


@contextmanager
def decoding(path: str, form: str) -> Iterator[None]:
    """Turn what the decoder of this format raises inside the `with` block into a UserError that names the file."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise UserError(f"{path} does not hold what it should: {sentence(error)}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not {form}: {sentence(error)}.") from error
    except RecursionError as error:
        raise UserError(f"{path} is not {form} that can be read: it is nested too deeply.") from error


def sentence(error: Exception) -> str:
    """Return the library's message in a form that can follow a colon."""
    words = str(error).rstrip(".").replace(" - at ", ", at ")
    return words if words[:2].isupper() else words[:1].lower() + words[1:]     # not of "JSON is malformed"


def open_tensors(path: str) -> Any:
    """Open a safetensors file; only its header is read. Raises UserError if it is another file, or is cut off."""
    check_readable(path)         # the library's own errors do not tell
    try:
        with reading(path):
            return safe_open(path, "np")
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file, or is damaged: {error}.") from error
