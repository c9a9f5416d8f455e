"""Plain English: functions' docstrings begin with an imperative verb, classes' and modules' with a noun phrase, and two
classes have two names.
"""
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The folders and files whose docstrings keep the rules. Add one when its docstrings do.
KEPT = ["reference/comm", "reference/layers", "reference/parallel", "reference/schedules", "reference/training",
        "reference/generation", "reference/costs", "reference/batches.py", "reference/config.py",
        "reference/counter_rng.py", "reference/dropout.py", "reference/errors.py", "reference/ops.py",
        "reference/optimizer.py", "reference/params.py", "reference/precision.py",
        "mpi_impl/layers", "mpi_impl/data", "mpi_impl/data/prepare", "mpi_impl/checkpoints", "mpi_impl/recording",
        "mpi_impl/reports", "mpi_impl/reports/timelines", "mpi_impl/planning", "mpi_impl/generation",
        "mpi_impl/evaluation", "mpi_impl/programs", "mpi_impl/pretrain_gpt.py", "mpi_impl/pretrain_bert.py",
        "mpi_impl/launching/option_fields.py"]
# Words that begin a free relative or a lone prepositional phrase: neither a noun phrase nor a sentence.
NO_NOUNS = set("""As At By For From How If In Of On So To What Whatever When Where Whether Which Who Whoever Whose Why
    With Without""".split())
# And others that begin no imperative sentence.
NO_VERBS = NO_NOUNS | set("""A All Also An And Another Any Are Both But Called Each Either Every Everyone Given Has How
    Inside Is It Its Just Less Likewise Many More Most Neither No Nobody None Not Nothing One Only Or Others Outside
    Over Positions Same Several Some Such That The Their Them There These They This Those Two Under Until""".split())
THIRD_PERSON = re.compile(r"(Compute|Declare|Find|Give|Keep|Make|Raise|Read|Return|Say|Send|Take|Tell|Write|Yield)s\b")


def docstrings(path: Path, *kinds: type) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of these kinds of nodes below a folder or in a file, each with its place."""
    for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text[:60]}", text


def is_imperative(text: str) -> bool:
    """Report whether a text begins with a capitalised word that may be an imperative, and goes on."""
    first = re.match(r"[A-Z][a-z]+(-[a-z]+)*(?=[\s,:])", text)
    return first is not None and first[0] not in NO_VERBS and not THIRD_PERSON.match(text)


@pytest.mark.parametrize("kept", KEPT)
def test_a_functions_docstring_begins_with_an_imperative_verb(kept):
    wrong = [place for place, text in docstrings(ROOT / kept, ast.FunctionDef) if not is_imperative(text)]
    assert (ROOT / kept).exists() and wrong == []


@pytest.mark.parametrize("kept", KEPT)
def test_a_classs_or_modules_docstring_begins_with_a_noun_phrase(kept):
    wrong = [place for place, text in docstrings(ROOT / kept, ast.ClassDef, ast.Module) if text.split()[0] in NO_NOUNS]
    assert (ROOT / kept).exists() and wrong == []


@pytest.mark.parametrize("text", ["Of m microbatches.", "What is sent.", "x [b, s] -> [b, s].", "Whether it ends.",
                                  "float64 in (0, 1).", "Raises UserError below 1.", "`f` of x.", "Return."])
def test_other_beginnings_are_no_imperatives(text):
    assert not is_imperative(text) and is_imperative(f"Return {text}")


def classes() -> Iterator[tuple[str, str, Path]]:
    """Yield each class of the packages: its name, its package, and its file there."""
    for package in ("reference", "mpi_impl", "grading", "benchmarks"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    yield node.name, package, file.relative_to(ROOT / package)


def test_two_classes_of_one_name_are_twins_of_the_textbook_and_the_machine():
    found = defaultdict(list)
    for name, package, file in classes():
        found[name].append((package, file))
    doubled = {name: places for name, places in found.items() if len(places) > 1}
    twins = {name for name, places in doubled.items()
             if [package for package, _ in places] == ["reference", "mpi_impl"] and places[0][1] == places[1][1]}
    assert "Trainer" in twins and doubled.keys() - twins == set()
