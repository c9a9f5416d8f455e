"""Profiles of hardware, files of numbers in TOML: those that come along, and what benchmarks/calibrate.py writes."""
import json
import math
import os
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from mpi_impl.files import reading, write_whole
from reference.errors import UserError
from reference.hardware import Hardware, Link, Passes

HERE = Path(__file__).parent / "hardware"
PARTS = {"passes": Passes, "inside": Link, "between": Link}     # the tables of a file


def known() -> list[str]:
    """The names of those that come along."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def load(name: str) -> Hardware:
    """By its name, or the path of a file. Raises UserError if there is none, or if it makes no sense."""
    path = HERE / f"{name}.toml"
    if name not in known():
        if not os.path.exists(name):
            raise UserError(f"--hardware is {name!r}, but must be {', '.join(known())}, or a profile's file, as "
                            "benchmarks/calibrate.py writes one; there is no such file.")
        path = Path(name)
    with reading(str(path)), open(path, "rb") as file:
        try:
            found = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"--hardware {name} is no file in TOML: {error}.") from error
    return hardware_of(path.stem, found)


def hardware_of(name: str, found: dict[str, Any]) -> Hardware:
    """From what a file says. Raises UserError."""
    values: dict[str, Any] = {}
    for key, value in found.items():
        if key in PARTS:
            check_keys(PARTS[key], value, f"--hardware {name}: [{key}]")
            value = built(PARTS[key], value, f"--hardware {name}: [{key}]")
        values[key] = value
    check_keys(Hardware, values | {"name": name}, f"--hardware {name}")
    return built(Hardware, values | {"name": name}, f"--hardware {name}")


def check_keys(kind: type, values: Any, what: str) -> None:
    """Raises UserError for what is missing, or means nothing."""
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if not isinstance(values, dict):
        raise UserError(f"{what} must have {', '.join(known)}, each with its value.")
    missing = [name for name, needed in known.items() if needed and name not in values]
    unknown = [name for name in values if name not in known]
    if missing or unknown:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which means nothing there"
        raise UserError(f"{what} {wrong}. dgx-a100.toml in {HERE} is an example.")


def built(kind: type, values: dict[str, Any], what: str):
    """A `kind` of these values. Raises UserError where a number is none."""
    for name, value in values.items():
        if name == "about" and not isinstance(value, str):
            raise UserError(f"{what}: about is {value!r}, but must be a text.")
        if name not in ("name", "about", *PARTS) and not is_numbers(value):
            raise UserError(f"{what}: {name} is {value!r}, but must be a number, or a list of some.")
    try:
        return kind(**{name: tupled(value) for name, value in values.items()})
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise UserError(f"{what}: {error}") from error
        raise UserError(f"{what} makes no sense: {error}. dgx-a100.toml in {HERE} is an example.") from error


def is_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(is_numbers, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def tupled(value: Any) -> Any:
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def save(hardware: Hardware, path: str) -> None:
    """As a file that `load` reads. Raises UserError if it cannot be written."""
    lines, tables = [], []
    for field in fields(hardware):
        value = getattr(hardware, field.name)
        if field.name in PARTS:
            tables += ["", f"[{field.name}]",
                       *(f"{one.name} = {toml(getattr(value, one.name))}" for one in fields(value))]
        elif field.name != "name":
            lines.append(f"{field.name} = {toml(value)}")
    write_whole(path, "\n".join([*lines, *tables, ""]))


def toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)    # whose escapes are TOML's, too
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
