"""Profiles of hardware, files of numbers in TOML: the package's, and those that benchmarks/calibrate.py writes."""
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from mpi_impl.runtime.files import write_whole
from mpi_impl.runtime.formats import Object, read_toml, sentence
from reference.costs.hardware import Hardware, Link, Passes, Sharded
from reference.errors import UserError

HERE = Path(__file__).parent / "hardware"
PARTS = {"passes": Passes, "inside": Link, "between": Link, "sharded": Sharded}     # the tables of a file


def known() -> list[str]:
    """Return the names of the profiles in the package."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def load(name: str) -> Hardware:
    """Read a profile by its name, or the path of a file. Raise UserError if it is missing or makes no sense."""
    path = HERE / f"{name}.toml"
    if name not in known():
        if not os.path.exists(name):
            raise UserError(f"--hardware is {name!r}, but must be {', '.join(known())}, or a profile's file, as "
                            "benchmarks/calibrate.py writes one; there is no such file.")
        path = Path(name)
    return hardware_of(path.stem, read_toml(str(path), Object))


def hardware_of(name: str, found: Object) -> Hardware:
    """Make a profile of a file's content. Raise UserError if that is impossible."""
    try:
        check_known(Hardware, found, "")
        return msgspec.convert(found | {"name": name}, Hardware)
    except (msgspec.ValidationError, UserError) as error:
        raise UserError(f"--hardware {name} makes no sense: {sentence(error)}. dgx-a100.toml in {HERE} is an "
                        "example.") from error


def check_known(kind: type, found: Object, table: str) -> None:
    """Raise UserError for an unknown name, which may be a misspelt one."""
    for name, value in found.items():
        if name not in (known := [field.name for field in fields(kind)]):
            raise UserError(f"{table}{name} means nothing there; it may have {', '.join(known)}")
        if name in PARTS and isinstance(value, dict):
            check_known(PARTS[name], value, f"{name}.")


def save(hardware: Hardware, path: str) -> None:
    """Write a file that `load` reads. Raise UserError if it cannot be written."""
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
        return json.dumps(value, ensure_ascii=False)    # its escapes are TOML's, too
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
