"""Options as fields of frozen dataclasses. A field is the one place for an option's name, type, default and help.

A group of options is a dataclass, whose docstring is its title in --help. The options of a program are a dataclass that
inherits from its groups. What is parsed is only what was given: defaults of a preset, or of a model on disk, can so be
laid between a field's default and the command line.
"""
from argparse import SUPPRESS
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from mpi_impl.launching.entry import ArgumentParser
from reference.config import option
from reference.errors import UserError

Config = TypeVar("Config")


def option_field(default: Any = MISSING, help: str = "", metavar: str | None = None,
                 choices: Iterable[str] | None = None, repeated: bool = False) -> Any:
    """Declare an option. Without a default it is required; a `repeated` one may be given several times."""
    about = {"help": help, "metavar": metavar, "choices": choices and tuple(choices), "repeated": repeated}
    return field(default=default, metadata=about)


def same_option(group: type, name: str, default: Any) -> Any:
    """Declare an option of another group once more, with another default."""
    return field(default=default, metadata=declared(group)[name].metadata)


def declared(kind: Any) -> dict[str, Field]:
    """Return a dataclass's fields by name."""
    return {one.name: one for one in fields(kind)}


def parse_given(prog: str, description: str, kind: type, argv: Sequence[str] | None) -> dict[str, Any]:
    """Parse a command line, and return the options that it gives, by name. Raises UserError."""
    parser = ArgumentParser(prog=prog, description=description)
    add_options(parser, kind)
    return {name: tuple(value) if isinstance(value, list) else value
            for name, value in vars(parser.parse_args(argv)).items()}


def add_options(parser: ArgumentParser, kind: type) -> None:
    """Add the options of a program, group by group, in the order in which the program names its groups."""
    known, types, added = declared(kind), get_type_hints(kind), set[str]()
    for group in (*kind.__mro__[1:-1], kind):
        if own := [name for name in vars(group).get("__annotations__", ()) if name not in added]:
            titled = parser.add_argument_group(title(group))
            for name in own:
                titled.add_argument(option(name), **argparse_settings(known[name], types[name]))
            added.update(own)


def title(group: type) -> str:
    """Return the first line of a group's docstring as a title."""
    line = (group.__doc__ or "").splitlines()[0].rstrip(".")
    return line[:1].lower() + line[1:]


def argparse_settings(one: Field, kind: Any) -> dict[str, Any]:
    """Return what argparse is told about an option. Its default is none, so that only what was given is found."""
    about, default = one.metadata, one.default
    text = about["help"]
    if default not in (MISSING, None, False) and "default" not in text:
        text = f"{text} (default: {default})".strip()
    found: dict[str, Any] = {"help": text, "default": SUPPRESS}
    optional = NoneType in get_args(kind)
    kind = next(part for part in get_args(kind) if part is not NoneType) if optional else kind
    if kind is bool:
        return found | {"action": "store_true"}
    found |= {"metavar": about["metavar"], "required": default is MISSING}
    if about["repeated"]:
        return found | {"action": "append"}
    if get_args(kind):                                    # tuple[str, ...]
        return found | {"nargs": "+"}
    return found | {"type": kind, "choices": about["choices"]}


def filled(config: type[Config], options: Any, **others: Any) -> Config:
    """Make a config of the options that are called as its fields are, and of others. Raises UserError."""
    values = {name: getattr(options, name) for name in declared(config) if hasattr(options, name)}
    return config(**values | others)


def check_not_empty(given: Mapping[str, Any], paths: Iterable[str]) -> None:
    """Raises UserError for a path that is given and empty, as an unset variable of a script gives it."""
    for name in paths:
        value = given.get(name)
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise UserError(f"{option(name)} is empty. Give a path, or leave the option out.")
