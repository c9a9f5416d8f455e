"""Files in formats that cannot run as a program, as a pickle can: JSON and safetensors. Errors are sentences."""
import json
from typing import Any

from safetensors import SafetensorError, safe_open

from mpi_impl.files import reading
from reference.errors import UserError


def read_json(path: str) -> dict[str, Any]:
    """A JSON object. Raises UserError if there is none."""
    try:
        with reading(path), open(path, encoding="utf-8") as file:
            found = json.load(file)
    except ValueError as error:      # of JSON, or of UTF-8
        raise UserError(f"{path} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object, but a {type(found).__name__}.")
    return found


def open_tensors(path: str) -> Any:
    """A safetensors file, of which only the header is read. Raises UserError if it cannot be, or is cut off."""
    try:
        with reading(path):
            open(path, "rb").close()         # the library's own errors do not tell
            return safe_open(path, "np")
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file, or is damaged: {error}.") from error
