"""The execution of a notebook's cell on a rank, which keeps the cell's variables for the next one."""
import ast
import linecache
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from mpi_impl.comm.device import device_of
from mpi_impl.comm.group import Group

NAMES: dict[str, Any] = {"np": np}      # the cells' variables on this rank, as long as its process lives


def run_cell(group: Group, source: str, title: str, device: str = "cpu") -> None:
    """Run a cell with the variables of earlier cells. Print the value of its last line if that is an expression.

    In the cell, `group` is the group of the ranks that run it, `rank` this rank's number, and `size` their count. On a
    GPU `np` is CuPy.
    """
    __tracebackhide__ = True    # a traceback begins in the cell
    NAMES.update(group=group, rank=group.rank, size=group.size, __name__="ranks")
    linecache.cache[title] = len(source), None, source.splitlines(keepends=True), title     # for tracebacks
    body = ast.parse(source, title).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    with arrays_on_gpus(group) if device == "cuda" else nullcontext():
        exec(compile(ast.Module(body, []), title, "exec"), NAMES)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), title, "eval"), NAMES)
            if value is not None:
                print(repr(value))


@contextmanager
def arrays_on_gpus(group: Group) -> Iterator[None]:
    """Have all arrays of the cells on this rank's GPU, whose collectives go by NCCL; afterwards on the host again.

    Raises UserError, on all ranks, where that is impossible.
    """
    import cupy
    device = device_of("cuda", group, "nccl")
    group.instruments.like, group.instruments.device_path = device.like, device.path
    NAMES.update(moved(NAMES, np.ndarray, partial(np.asarray, like=device.like)), np=cupy)
    try:
        yield
        group.transports.free()
    finally:
        NAMES.update(moved(NAMES, type(device.like), lambda x: x.get()), np=np)


def moved(value: Any, kind: Any, move: Callable) -> Any:
    """Return a value with each array of numbers of this kind moved, those in lists, tuples and dicts, too."""
    if type(value) is kind:
        return value if value.dtype.kind in "OSU" else move(value)
    if isinstance(value, dict):
        return {key: moved(item, kind, move) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [moved(item, kind, move) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


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
