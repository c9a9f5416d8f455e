"""Options as fields of frozen dataclasses. A field is the one place for an option's name, type, default and help.

A group of options is a dataclass, whose docstring is its title in --help. The options of a program are a dataclass that
inherits from its groups. Parsing returns only the given options: so the values of a preset, or of a model on disk, can
come between the fields' defaults and the command line.
"""
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from inspect import get_annotations
from types import NoneType
from typing import Any, NoReturn, TypeVar, dataclass_transform, get_args, get_type_hints

from mpi_impl.launch.entry import ArgumentParser
from reference.config import option
from reference.errors import UserError

Config = TypeVar("Config")
PATHS = {"DIR", "F", "PATH"}        # metavars of options that name a folder, a file, or either


def option_field(default: Any = MISSING, help: str = "", metavar: str | None = None,
                 choices: Iterable[str] | None = None, repeated: bool = False,
                 check: Callable[[str, Any], None] | None = None, also: str | None = None,
                 known: Iterable[str] = ()) -> Any:
    """Declare an option. Without a default it is required; a `repeated` one may be given several times.

    `check(name, value)` raises UserError for a value that is never possible, whatever the other options are. `also` is
    another name of the option on the command line. Tab completion offers the choices, or the `known` values of an
    option that takes others, too.
    """
    choices = choices and tuple(choices)
    about = {"help": help, "metavar": metavar, "choices": choices, "repeated": repeated, "check": check, "also": also,
             "known": choices or tuple(known)}
    return field(default=default, metadata=about)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option_field,))
def option_group(kind: type[Config]) -> type[Config]:
    """Make a class of option fields a frozen dataclass, whose arguments have names.

    It gets the two functions below. `dataclass` would write functions for each class and compile them, and with a
    hundred fields that takes longer than all else that a program does until it knows its options.
    """
    kind.__init__, kind.__setattr__ = take_options, refuse_change      # type: ignore[method-assign]
    return dataclass(init=False, repr=False, eq=False)(kind)


def take_options(self, **given: Any) -> None:
    """Take the given options, and of the others the defaults. Raises TypeError for an option that there is not, and for
    a required one that is not given.
    """
    known = declared(type(self))
    required = {name for name, one in known.items() if one.default is MISSING}
    if wrong := given.keys() - known.keys() | required - given.keys():
        raise TypeError(f"{type(self).__name__} has other options: {', '.join(sorted(wrong))}")
    vars(self).update({name: one.default for name, one in known.items()} | given)


def refuse_change(self, name: str, value: Any) -> NoReturn:
    """Raise FrozenInstanceError: options are replaced as a whole."""
    raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be changed to {value!r}")


def same_option(group: type, name: str, default: Any) -> Any:
    """Declare an option of another group once more, with another default."""
    return field(default=default, metadata=declared(group)[name].metadata)


def declared(kind: Any) -> dict[str, Field]:
    """Return a dataclass's fields by name."""
    return {one.name: one for one in fields(kind)}


def parse_given(prog: str, description: str, kind: type, argv: Sequence[str] | None) -> dict[str, Any]:
    """Parse a command line, and return the options that it gives, by name.

    Each value is checked on its own; a path must not be empty, as an unset variable of a script makes it. Raises
    UserError.
    """
    parser = ArgumentParser(prog=prog, description=description)
    add_options(parser, kind)
    given = {name: tuple(value) if isinstance(value, list) else value
             for name, value in vars(parser.parse_args(argv)).items()}
    for name, value in given.items():
        about = declared(kind)[name].metadata
        if about["metavar"] in PATHS and "" in ([value] if isinstance(value, str) else value):
            raise UserError(f"{option(name)} is empty. Give a path, or leave the option out.")
        if about["check"]:
            about["check"](name, value)
    return given


def parse_choosing(prog: str, description: str, name: str, kinds: Mapping[str, type], argv: Sequence[str] | None,
                   usual: Any) -> tuple[type, dict[str, Any]]:
    """Parse a command line whose option `name` chooses its kind of options, by default the `usual` one. Return that
    kind, and the given options. Raises UserError.
    """
    parser = ArgumentParser(prog=prog, add_help=False)
    parser.add_argument(option(name), choices=tuple(kinds), dest="chosen")
    kind = kinds.get(parser.parse_known_args(argv)[0].chosen, usual)
    return kind, parse_given(prog, description, kind, argv)


def add_options(parser: ArgumentParser, kind: type) -> None:
    """Add the options of a program, group by group, in the order in which the program names its groups."""
    known, types, added = declared(kind), get_type_hints(kind), set[str]()
    for group in (*kind.__mro__[1:-1], kind):
        if own := [name for name in get_annotations(group) if name not in added]:
            titled = parser.add_argument_group((group.__doc__ or "").splitlines()[0].rstrip("."))
            for name in own:
                names = (name, known[name].metadata["also"])
                action = titled.add_argument(*map(option, filter(None, names)),
                                             **argparse_settings(known[name], types[name]))
                # For shardlab/completion.py.
                action.known = known[name].metadata["known"]    # type: ignore[attr-defined]
            added.update(own)


def argparse_settings(one: Field, kind: Any) -> dict[str, Any]:
    """Return argparse's settings of an option. They have no default, so that parsing finds only given options."""
    about, default = one.metadata, one.default
    text = about["help"]
    if default not in (MISSING, None, False, ()) and "default" not in text:
        text = f"{text} (default: {default})".strip()
    found: dict[str, Any] = {"help": text, "default": SUPPRESS}
    optional = NoneType in get_args(kind)
    kind = next(part for part in get_args(kind) if part is not NoneType) if optional else kind
    if kind is bool:
        return found | {"action": "store_true"}
    found |= {"metavar": about["metavar"], "required": default is MISSING, "choices": about["choices"]}
    if get_args(kind):                                    # tuple[int, ...]
        several = {"action": "append"} if about["repeated"] else {"nargs": "+"}
        return found | several | {"type": get_args(kind)[0]}
    return found | {"type": kind}


def filled(config: type[Config], options: Any, **others: Any) -> Config:
    """Make a config of the options that have the names of its fields, and of others. Raises UserError.

    An option that is None leaves its field at the config's default, if there is one.
    """
    values = {name: getattr(options, name, None) for name, one in declared(config).items()
              if getattr(options, name, None) is not None or hasattr(options, name) and one.default is MISSING}
    return config(**values | others)
