"""A planted bug is seen by all who imported the function, leaves with the block, and is never stale in silence."""
import importlib
import sys

import pytest

from tests.planted import Bug, StaleBug, assert_caught, planted

MODULE = '''"""A module to plant bugs in."""
SCALE = 3


def double(x, offset=0):
    """Twice x."""
    return 2 * x + offset      # not three times


class Box:
    def __init__(self, x):
        super().__init__()
        self.x = x
'''


@pytest.fixture
def victim(tmp_path, monkeypatch):
    """Import a module of its own for each test."""
    name = f"victim_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(name)
    del sys.modules[name]


def test_every_importer_has_the_bug_within_the_block_alone(victim):
    double = victim.double
    with pytest.raises(KeyError), planted(victim.__name__, "2 * x", "3 * x"):
        assert double(5) == victim.double(5) == 15
        raise KeyError
    assert double(5) == 10


@pytest.mark.parametrize("right, wrong, said", [
    ("5 * x", "3 * x", "0 times"), ("__init__", "y", "2 times"), ("SCALE = 3", "SCALE = 4", "more"),
    ("not three times", "three times", "nothing"), ("super().__init__()", "pass", "enclosing function")])
def test_a_bug_that_cannot_be_planted_is_an_error(victim, right, wrong, said):
    with pytest.raises(StaleBug, match=said), planted(victim.__name__, right, wrong):
        pass


# --- on ranks

TITLE = Bug("mpi_impl.comm.ledger", 'self._phase = "outside a step"', 'self._phase = "nowhere"')


def phase_of_a_new_ledger(group):
    return type(group.ledger)()._phase


def check_phase(group):
    assert phase_of_a_new_ledger(group) == "outside a step"


def test_assert_caught_wants_a_pass_without_the_bug_and_a_failure_with_it(ranks):
    assert_caught(ranks, 2, TITLE, check_phase)
    with pytest.raises(AssertionError, match="phase_of_a_new_ledger did not catch"):
        assert_caught(ranks, 2, TITLE, phase_of_a_new_ledger)
