"""Every bug of the zoo is planted: the theorem of its entry falls, or, of a bug below rounding, stays silent.

The bugs, with their stories and sources, are in tests/zoo: a file for each subject.
"""
import re
import sys
from pathlib import Path
from subprocess import run

import pytest

from mpi_impl.launch.pool import RankFailure, pickle_call
from tests import zoo
from tests.deep import one_fast_of
from tests.planted import assert_fails, planted, planted_run
from tests.zoo.entry import AXES, KINDS, SOURCE, Bug, Theorem
from tests.zoo.unproved import UNPROVED

ON_RANKS = [entry.name for entry in zoo.ENTRIES if entry.theorem.ranks and not entry.silent]
HERE = [entry.name for entry in zoo.ENTRIES if not entry.theorem.ranks and not entry.silent]
SILENT = [entry.name for entry in zoo.ENTRIES if entry.silent]
HANGS = 4.0         # seconds after which ranks that have a bug are not waited for: the theorem holds within one
EXACT = [entry.name for entry in zoo.ENTRIES if entry.theorem.exact and entry.name not in UNPROVED]


@pytest.fixture(scope="module")
def ranks(small_pools):
    """Return small pools, since many bugs leave ranks hanging."""
    return small_pools


@pytest.fixture(scope="module")
def holds(ranks):
    """Return a function that asserts a theorem on ranks without a bug: once, however many bugs it catches."""
    known: set[bytes] = set()

    def assert_once(theorem: Theorem) -> None:
        call = pickle_call(theorem.function, (theorem.ranks, theorem.args))
        if call not in known:
            ranks.run(theorem.ranks, theorem.function, *theorem.args)
            known.add(call)

    return assert_once


@pytest.mark.parametrize("name", one_fast_of(9, ON_RANKS))
def test_ranks_catch_the_bug(ranks, holds, name):
    """By a mistake's consequences, not because the wrong text is no program."""
    bug, theorem = zoo.BY_NAME[name].bug, zoo.BY_NAME[name].theorem
    holds(theorem)
    failure = assert_fails(ranks, theorem.ranks, bug, theorem.function, *theorem.args, timeout=HANGS)
    assert not re.search("NameError|UnboundLocalError|positional argument", str(failure)), failure


@pytest.mark.parametrize("name", HERE)
def test_the_textbook_catches_the_bug(name):
    bug, theorem = zoo.BY_NAME[name].bug, zoo.BY_NAME[name].theorem
    theorem.function(*theorem.args)
    with planted(*bug), pytest.raises(AssertionError):
        theorem.function(*theorem.args)


@pytest.mark.parametrize("name", SILENT)
def test_floats_cannot_see_a_bug_below_rounding(ranks, name):
    """Though the wrong line is run: a bug of the same form is seen as soon as it is large enough."""
    bug, theorem = zoo.BY_NAME[name].bug, zoo.BY_NAME[name].theorem
    run_with(ranks, bug, theorem)
    larger = bug._replace(wrong=re.sub(r"2\.0\*\*-\d\d|1 / 3|1 / total|0\.7071067811865475", r"(\g<0> + 2.0**-20)",
                                       bug.wrong))
    with pytest.raises((AssertionError, RankFailure)):
        run_with(ranks, larger, theorem)


@pytest.mark.parametrize("name", [*SILENT, *one_fast_of(48, [name for name in EXACT if name not in SILENT])])
def test_exact_numbers_see_the_bug(ranks, name):
    """A bug below rounding, too: exact numbers have no rounding that it could hide in."""
    bug, theorem = zoo.BY_NAME[name].bug, zoo.BY_NAME[name].theorem.exact
    if not theorem.ranks:
        theorem.function(*theorem.args)     # those on ranks hold: test_layers.py and test_training.py
    with pytest.raises((AssertionError, RankFailure)) as failure:
        run_with(ranks, bug, theorem, timeout=60)
    assert not re.search("has no attribute|no implementation", str(failure.value)), failure.value


def run_with(ranks, bug: Bug, theorem: Theorem, timeout=30.0) -> None:
    """Run a theorem with a bug planted."""
    if theorem.ranks:
        ranks.run(theorem.ranks, planted_run, bug, theorem.function, *theorem.args, timeout=timeout)
    else:
        with planted(*bug):
            theorem.function(*theorem.args)


# ---- the data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", zoo.ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_says_where_it_comes_from(entry):
    assert zoo.BY_NAME[entry.name] is entry and entry.kind in KINDS and entry.axis in AXES
    assert re.fullmatch(SOURCE, entry.source)
    on_ranks = "mpi_impl.", "shardlab.", "reference."
    assert entry.bug.module.startswith(on_ranks if entry.theorem.ranks else "reference.")
    assert (Path(__file__).parents[1] / entry.bug.file).is_file()


def test_the_zoo_can_be_read_without_tests_and_ranks():
    """Another program may draw from it where neither is installed."""
    loaded = run([sys.executable, "-c", "import sys, tests.zoo; print(*sys.modules)"], capture_output=True, text=True,
                 cwd=Path(__file__).parent.parent, check=True).stdout.split()
    assert "tests.zoo.entry" in loaded and not {"pytest", "hypothesis", "mpi4py", "mpi_impl"} & set(loaded)
