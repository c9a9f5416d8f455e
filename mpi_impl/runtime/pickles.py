"""Pickles of other programs, of which nothing is executed: what a pickle may name is on a list, all else is refused.

A pickle is a program: it names functions, and calls them. An unpickler that finds only what is on a list of harmless
names cannot be made to do anything else. Without a list it builds numbers, texts, lists and dicts, and nothing more.
"""
import pickle
from collections.abc import Mapping
from io import BytesIO
from pickletools import genops, markobject
from typing import Any

from mpi_impl.runtime.files import read_bytes
from reference.errors import UserError

LARGEST_PICKLE = 1 << 28      # bytes: of lists, not of arrays
DEEPEST = 10_000              # tuples in one another: hashing a tuple recurses without a limit, until the stack ends

# What a damaged pickle makes the unpickler raise.
DAMAGED = (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError,
           MemoryError, RecursionError, ImportError)


class Refused(Exception):
    """The pickle names something that is not on the list."""


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that finds the `allowed` objects, by (module, name), and nothing else."""

    def __init__(self, file: BytesIO, allowed: Mapping[tuple[str, str], Any]):
        super().__init__(file)
        self.file, self.allowed = file, allowed

    def load(self) -> Any:
        check_depth(self.file.getvalue())
        return super().load()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise Refused(f"{module}.{name}")
        return self.allowed[module, name]


def check_depth(content: bytes) -> None:
    """Raise RecursionError for a pickle that puts more than DEEPEST tuples in one another.

    It follows the depths of what the unpickler's stack and memo hold, if the pickle has opcodes enough for that.
    """
    if sum(map(content.count, (b"t", b"\x85", b"\x86", b"\x87"))) <= DEEPEST:
        return
    stack, marks, memo = [0], list[int](), dict[Any, int]()
    for opcode, argument, _ in genops(content):
        name, before = opcode.name, opcode.stack_before
        if name == "MARK":
            marks.append(len(stack))
            continue
        start = marks.pop() - before.index(markobject) if markobject in before else len(stack) - len(before)
        depth = memo[argument] if "GET" in name else max(stack[start:], default=0) + name.startswith("TUPLE")
        stack[start:] = [depth] * len(opcode.stack_after)
        if "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = stack[-1]
        if depth > DEEPEST:
            raise RecursionError


def read_pickle(path: str, allowed: Mapping[tuple[str, str], Any] | None = None) -> Any:
    """Read a file that is one pickle. Raises UserError if it is none, or names what is not allowed."""
    content = read_bytes(path, LARGEST_PICKLE)
    try:
        return RestrictedUnpickler(BytesIO(content), allowed or {}).load()
    except Refused as error:
        raise UserError(f"{path} is a pickle that wants to use {error}, which what it should hold does not need: it is "
                        "not read further, since a pickle can run any program.") from error
    except DAMAGED as error:
        raise UserError(f"{path} is no pickle that can be read: it is damaged, cut off, or another kind of "
                        "file.") from error
