"""The execution of a notebook's cell on a rank, which keeps the cell's variables for the next one."""
import ast
import linecache
import pickle
from typing import Any

import numpy as np

from mpi_impl.comm.group import Group

NAMES: dict[str, Any] = {"np": np}      # the cells' variables on this rank, as long as its process lives


def run_cell(group: Group, source: str, title: str) -> None:
    """Run a cell with the variables of earlier cells. Print the value of its last line if that is an expression.

    In the cell, `group` is the group of the ranks that run it, `rank` this rank's number, and `size` their count.
    """
    __tracebackhide__ = True    # a traceback begins in the cell
    NAMES.update(group=group, rank=group.rank, size=group.size, __name__="ranks")
    linecache.cache[title] = len(source), None, source.splitlines(keepends=True), title     # for tracebacks
    body = ast.parse(source, title).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), title, "exec"), NAMES)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), title, "eval"), NAMES)
        if value is not None:
            print(repr(value))


def value_of(group: Group, name: str) -> tuple[bytes, str]:
    """Return the pickled value of a variable on this rank and "", or b"" and the reason why there is no value."""
    if name not in NAMES:
        return b"", f"there is no {name!r}: no cell has set it"
    try:
        return pickle.dumps(NAMES[name]), ""
    except Exception as error:      # whatever an object's own pickling may raise
        return b"", f"{name!r} cannot leave the rank: {error}"


def set_variable(group: Group, name: str, value: Any) -> None:
    """Set a variable of the cells on this rank."""
    NAMES[name] = value
