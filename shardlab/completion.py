"""Tab completion of `shardlab`, by shtab: `shardlab completion bash` prints a script for a shell.

The script is made of the programs' own parsers: each program is asked for its help, and its parser is kept.
"""
import argparse
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn
from unittest import mock

import mpi4py
import shtab

from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.launch.launcher import add_launch_options
from reference.errors import UserError
from shardlab.command import COMMANDS, PROGRAMS, Module, program_of, run_module
from shardlab.demos import DEMOS

KINDS = "--task", "--model"     # options on whose values the other options depend


class HelpAsked(SystemExit):
    """The end of a program that was asked for its help."""

    def __init__(self, parser: argparse.ArgumentParser):
        super().__init__()
        self.parser = parser


def main(argv: Sequence[str] | None = None) -> None:
    mpi4py.rc.initialize = False    # programs are imported, and no rank starts
    parser = ArgumentParser(prog="shardlab.completion", description="Print the script by which a shell completes "
                            "commands, options and their values.")
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="which the script is for")
    shell = parser.parse_args(argv).shell
    # In bash, files are the default, since shtab completes no option behind a list of files.
    script = shtab.complete(whole_parser({} if shell == "bash" else shtab.FILE), shell)
    print(script.replace("complete -o bashdefault", "complete -o bashdefault -o default"))


def whole_parser(files: dict) -> argparse.ArgumentParser:
    """Return a parser of all commands, with the programs and the options of each. `files` is shtab's word for files."""
    whole = argparse.ArgumentParser("shardlab")
    commands = whole.add_subparsers()
    for name, command in COMMANDS.items():
        if name not in ("run", "demos"):
            with suppress(UserError):       # labs, whose sources an installed package lacks
                add_program(commands, [name], files)
            continue
        parser = commands.add_parser(name, help=command.about)
        words, programs = ([name, "-n", "1"], PROGRAMS) if name == "run" else ([name], DEMOS)
        if name == "run":
            add_launch_options(parser)
        below = parser.add_subparsers()
        for program in programs:
            add_program(below, [*words, program], files)
    return whole


def add_program(programs, words: list[str], files: dict) -> None:
    """Add the parser of a program, with the options of all its kinds, and those of the launcher if it starts ranks."""
    module: Any = program_of([*words, "--help"])
    parsers = [parser_of(module.name)]
    for option in KINDS:
        if (action := parsers[0]._option_string_actions.get(option)) and action.choices:
            parsers += [parser_of(module.name, option, kind) for kind in action.choices]
    parser = programs.add_parser(words[-1], add_help=False, help=parsers[0].description or "")
    for action in {action.dest: action for one in parsers for action in one._actions}.values():
        parser._add_action(action)
        action.choices = action.choices or getattr(action, "known", None)
        if not action.choices and action.nargs != 0:
            action.complete = files     # type: ignore[attr-defined]
    if words[0] != "run" and isinstance(program_of(words), argparse.Namespace):
        add_launch_options(parser, ranks=1)


def parser_of(module: str, *words: str) -> argparse.ArgumentParser:
    """Return the parser of a program that is started with these words. Raises UserError if it cannot start."""
    def keep(parser: argparse.ArgumentParser) -> NoReturn:
        raise HelpAsked(parser)

    with mock.patch.object(argparse.ArgumentParser, "format_help", keep):
        try:
            run_module(Module(module, [*words, "--help"]))
        except HelpAsked as asked:
            return asked.parser
    raise AssertionError(f"{module} has no help")


if __name__ == "__main__":
    run_alone(main)
