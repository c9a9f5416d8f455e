"""Plant a classic bug in a module, and show that a proof catches it.

    bug = Bug("mpi_impl.layers.mlp", right="return region.enter_backward(dx)", wrong="return dx")
    assert_caught(ranks, 4, bug, mlp_equals_whole)

`right` must occur exactly once in the module's source, so that a bug whose line has been rewritten is noticed. The
bug is planted in the code objects of the functions themselves: everyone who imported them has it.
"""
import ast
import importlib
import importlib.util
import inspect
import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mpi_impl.launch.pool import Pool, RankFailure
from tests.small_pools import SmallPools
from tests.zoo.entry import Bug


class StaleBug(Exception):
    """A bug that cannot be planted: the module has changed since it was thought of."""


@contextmanager
def planted(module_name: str, right: str, wrong: str) -> Iterator[None]:
    """Plant a bug in the module's functions for the duration of the `with` block."""
    with planted_codes(module_name, buggy_codes(Bug(module_name, right, wrong))):
        yield


@contextmanager
def planted_codes(module_name: str, codes: dict[str, CodeType]) -> Iterator[None]:
    """Give the module's functions other code objects for the duration of the `with` block."""
    functions = {find_function(importlib.import_module(module_name), name): code for name, code in codes.items()}
    originals = {function: function.__code__ for function in functions}
    try:
        for function, code in functions.items():
            if function.__code__.co_freevars != code.co_freevars:
                raise StaleBug(f"{module_name}.{function.__qualname__}: the bug uses other variables of the "
                               "enclosing function, which cannot be planted.")
            function.__code__ = code
        yield
    finally:
        for function, code in originals.items():
            function.__code__ = code


def planted_run(group, bug: Bug, function: Callable, *args):
    """Run `function(group, *args)` on a rank of a pool, with the bug planted there."""
    with planted(*bug):
        return function(group, *args)


def assert_caught(pool: Pool | SmallPools, n: int, bug: Bug, function: Callable, *args,
                  timeout: float = 30.0) -> RankFailure:
    """Assert that `function` passes on n ranks, and fails with the bug planted; return that failure."""
    buggy_codes(bug)                # before a run: a stale bug must not count as caught
    pool.run(n, function, *args, timeout=timeout)
    return assert_fails(pool, n, bug, function, *args, timeout=timeout)


def assert_fails(pool: Pool | SmallPools, n: int, bug: Bug, function: Callable, *args,
                 timeout: float = 30.0) -> RankFailure:
    """Assert that `function` fails on n ranks with the bug planted; return that failure."""
    buggy_codes(bug)
    try:
        pool.run(n, planted_run, bug, function, *args, timeout=timeout)
    except RankFailure as failure:
        return failure
    raise AssertionError(f"{function.__qualname__} did not catch `{bug.wrong}` in place of `{bug.right}` "
                         f"in {bug.module}.")


def buggy_codes(bug: Bug) -> dict[str, CodeType]:
    """Return the code objects of the functions that the bug changes, by qualified name. Import nothing."""
    source = source_of(bug.module)
    if (count := source.count(bug.right)) != 1:
        raise StaleBug(f"`{bug.right}` occurs {count} times in {bug.module}, where it should occur once.")
    return changed_codes(bug, source, source.replace(bug.right, bug.wrong))


def changed_codes(bug: Bug, source: str, changed: str) -> dict[str, CodeType]:
    """Return the code objects of the functions whose bodies differ between the two sources, by qualified name."""
    right, wrong = ast.parse(source), ast.parse(changed)
    wrong_bodies = bodies(wrong)
    names = [name for name, body in bodies(right).items() if wrong_bodies.get(name) != body]
    if skeleton(right) != skeleton(wrong):
        raise StaleBug(f"`{bug.wrong}` changes more of {bug.module} than the bodies of functions: a default, a "
                       "decorator or a constant, which importers have already taken.")
    if not names:
        raise StaleBug(f"`{bug.wrong}` in place of `{bug.right}` changes nothing in {bug.module}.")
    filename = f"<{bug.module}, with a planted bug>"
    linecache.cache[filename] = (len(changed), None, changed.splitlines(keepends=True), filename)
    codes = function_codes(compile(changed, filename, "exec"))
    return {name: codes[name] for name in names}


def source_of(module_name: str) -> str:
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        raise StaleBug(f"There is no module {module_name}.")
    return Path(spec.origin).read_text(encoding="utf-8")


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the module's functions and its classes' methods, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        else:
            yield from functions_of(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def bodies(tree: ast.Module) -> dict[str, list[str]]:
    """Return the bodies of all functions, as text without line numbers. A name that stands twice keeps both."""
    found: dict[str, list[str]] = {}
    for name, node in functions_of(tree):
        found.setdefault(name, []).extend(ast.dump(statement) for statement in node.body)
    return found


def skeleton(tree: ast.Module) -> str:
    """Return the module without the bodies of its functions. Empty the tree."""
    for _, node in functions_of(tree):
        node.body = []
    return ast.dump(tree)


def function_codes(code: CodeType) -> dict[str, CodeType]:
    """Return the code objects of a module's functions and of its classes' methods, by qualified name."""
    found: dict[str, CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            is_function = inner.co_flags & inspect.CO_OPTIMIZED     # else it is the body of a class
            found |= {inner.co_qualname: inner} if is_function else function_codes(inner)
    return found


def find_function(module: ModuleType, qualified_name: str) -> FunctionType:
    """Return the live function, from under its decorators."""
    found: Any = module
    for name in qualified_name.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property | cached_property):
        found = found.fget if isinstance(found, property) else found.func
    found = inspect.unwrap(getattr(found, "__func__", found))
    if not isinstance(found, FunctionType) or found.__code__.co_qualname != qualified_name:
        raise StaleBug(f"{module.__name__}.{qualified_name} is hidden by a decorator or a later definition.")
    return found
