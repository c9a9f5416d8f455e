"""Plain English: functions' docstrings begin with an imperative verb, classes' and modules' with a noun phrase, and two
classes have two names.
"""
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
# All folders whose docstrings keep the rules, with the folders in them.
PACKAGES = ("reference", "mpi_impl", "grading", "benchmarks", "tools", "tests")
KEPT = sorted({str(file.parent.relative_to(ROOT)) for package in PACKAGES for file in (ROOT / package).rglob("*.py")})
# Words that begin a free relative or a lone prepositional phrase: neither a noun phrase nor a sentence.
NO_NOUNS = set("""As At By For From How If In Of On So To What Whatever When Where Whether Which Who Whoever Whose Why
    With Without""".split())
# And others that begin no imperative sentence.
NO_VERBS = NO_NOUNS | set("""A About After All Also An And Another Any Are Before Both But Called Each Either Every
    Everyone Few Given Has How Inside Is It Its Just Less Likewise Many More Most Neither No Nobody None Not Nothing
    Once One Only Or Other Others Outside Over Same Several Some Such That The Their Them There These They This Those
    Three Twice Two Under Until Whenever While Whom Within""".split())
PLURAL_OR_THIRD_PERSON = re.compile(r"[A-Z][\w-]*[^s\W]s\b")      # "Tokens that ...", "Returns ...", but "Pass ..."


class Definition(NamedTuple):
    """A function, a class or a module of a file."""

    kind: type
    name: str
    line: int
    docstring: str | None


@cache
def definitions(file: Path) -> list[Definition]:
    """Return what a file defines, and the file itself."""
    return [Definition(type(node), getattr(node, "name", ""), getattr(node, "lineno", 1), ast.get_docstring(node))
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)]


def docstrings(path: Path, *kinds: type) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of these kinds of definitions in a folder or a file, tests excepted, with their places."""
    for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
        for kind, name, line, text in definitions(file):
            is_test = kind is ast.FunctionDef and name.startswith("test_")
            if kind in kinds and not is_test and text:
                yield f"{file.relative_to(ROOT)}:{line}: {text[:60]}", text


def is_imperative(text: str) -> bool:
    """Report whether a text begins with a capitalised word that may be an imperative, and goes on."""
    first = re.match(r"[A-Z][a-z]+(-[a-z]+)*(?=[\s,:])", text)
    return first is not None and first[0] not in NO_VERBS and not PLURAL_OR_THIRD_PERSON.match(text)


@pytest.mark.parametrize("kept", KEPT)
def test_a_functions_docstring_begins_with_an_imperative_verb(kept):
    """A test's own docstring states its theorem, so it may be any sentence."""
    wrong = [place for place, text in docstrings(ROOT / kept, ast.FunctionDef) if not is_imperative(text)]
    assert (ROOT / kept).exists() and wrong == []


@pytest.mark.parametrize("kept", KEPT)
def test_a_classs_or_modules_docstring_begins_with_a_noun_phrase(kept):
    wrong = [place for place, text in docstrings(ROOT / kept, ast.ClassDef, ast.Module) if text.split()[0] in NO_NOUNS]
    assert (ROOT / kept).exists() and wrong == []


@pytest.mark.parametrize("text", ["Of m microbatches.", "What is sent.", "x [b, s] -> [b, s].", "Whether it ends.",
                                  "float64 in (0, 1).", "Raises UserError below 1.", "`f` of x.", "Return.",
                                  "Tokens of a text.", "Whenever it ends.", "While it lasts."])
def test_other_beginnings_are_no_imperatives(text):
    assert not is_imperative(text) and is_imperative(f"Return {text}")


def classes() -> Iterator[tuple[str, str, Path]]:
    """Yield each class of the packages: its name, its package, and its file there."""
    for package in ("reference", "mpi_impl", "grading", "benchmarks"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for found in definitions(file):
                if found.kind is ast.ClassDef:
                    yield found.name, package, file.relative_to(ROOT / package)


def test_two_classes_of_one_name_are_twins_of_the_textbook_and_the_machine():
    found = defaultdict(list)
    for name, package, file in classes():
        found[name].append((package, file))
    doubled = {name: places for name, places in found.items() if len(places) > 1}
    twins = {name for name, places in doubled.items()
             if [package for package, _ in places] == ["reference", "mpi_impl"] and places[0][1] == places[1][1]}
    assert "Trainer" in twins and doubled.keys() - twins == set()
