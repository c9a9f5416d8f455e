"""Tab completion of `shardlab`, by argcomplete: commands, programs, the long options of each, and their values.

A shell waits for it at every press of the key, and importing the programs would take a second. So options are read from
the sources that declare them, by their syntax, and only those of the program on the line. For the values of an option
its module is imported.
"""
import argparse
import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mpi_impl.launch.launcher import add_launch_options
from mpi_impl.launch.option_fields import declared

ROOT = Path(__file__).parents[2]


class Completed(NamedTuple):
    """A command or a program that can be completed."""

    options: str = ""               # where they are declared: 'package.module', or 'package.module:Class'
    launches: bool = False          # whether it takes the launcher's options, too
    programs: Mapping[str, "Completed"] = {}     # one of which comes next, by name


def complete(prog: str, commands: Mapping[str, Completed]) -> None:
    """Print the completions of the line that the shell has put into the environment, and end this process."""
    import argcomplete

    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    add_completed(parser, Completed(programs=commands), set(os.environ.get("COMP_LINE", "").split()))
    argcomplete.autocomplete(parser, always_complete_options=False)


def add_completed(parser: argparse.ArgumentParser, completed: Completed, words: set[str]) -> None:
    """Add the options of a command, and those of its programs that are among the words."""
    if completed.launches:
        add_launch_options(parser, ranks=1)
    for option, settings in declared_options(completed.options).items():
        action: Any = parser.add_argument(option, **settings)
        action.completer = partial(known_values, completed.options, option)
    if completed.programs:
        programs = parser.add_subparsers()
        for name, program in completed.programs.items():
            below = programs.add_parser(name, allow_abbrev=False)
            if name in words:
                add_completed(below, program, words)


def known_values(where: str, option: str, **line: Any) -> Iterable[str]:
    """Return the values of an option that is a field of a class there, if the field names some."""
    module, _, name = where.partition(":")
    namespace = vars(import_module(module))
    for kind in [namespace[name]] if name else filter(is_dataclass, namespace.values()):
        one = declared(kind).get(option.removeprefix("--").replace("-", "_"))
        if one and "known" in one.metadata:     # a field of another class may have the name
            return one.metadata["known"]
    return ()


# ---- options, from the sources that declare them --------------------------------------------------------------------

Options = dict[str, dict[str, Any]]     # by name, each with how many words behind it are its values, as for argparse


def declared_options(where: str) -> Options:
    """Return the options that a class, or all of a module, declares."""
    module, _, name = where.partition(":")
    if not module:
        return {}
    if name:
        return fields_of(module, name)
    tree = syntax_of(module)
    found = dict(options_in_calls(tree))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= fields_of(module, node.name)
    return found


@cache
def syntax_of(module: str) -> ast.Module:
    return ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))


def fields_of(module: str, name: str) -> Options:
    """Return the option fields of a class and of its bases. A class of others has none."""
    tree, found = syntax_of(module), Options()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and name in [one.name for one in node.names]:
            origin = node.module or ""
            return fields_of(origin, name) if origin.startswith(("mpi_impl.", "shardlab.")) else {}
        if isinstance(node, ast.ClassDef) and node.name == name:
            for base in node.bases:
                found |= fields_of(module, ast.unparse(base))
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call):
                    option = "--" + ast.unparse(field.target).replace("_", "-")
                    found[option] = values_of_field(ast.unparse(field.annotation), field.value)
    return found


def values_of_field(annotation: str, declaration: ast.Call) -> dict[str, Any]:
    if annotation == "bool":
        return {"action": "store_true"}
    repeated = any(keyword.arg == "repeated" for keyword in declaration.keywords)
    return {"nargs": "+"} if annotation.startswith("tuple") and not repeated else {}


def options_in_calls(tree: ast.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the options that calls of `add_argument` spell out."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
            name = call.args[0].value
            if isinstance(name, str) and name.startswith("--"):
                constants = {one.arg: one.value.value for one in call.keywords if isinstance(one.value, ast.Constant)}
                yield name, {key: constants[key] for key in ("action", "nargs") if key in constants}
