"""Fixtures that the tests of labs share."""
import pytest

from grading import checks
from grading.values import LARGEST
from tests.small_pools import SmallPools


@pytest.fixture(scope="package", autouse=True)
def limited_ranks():
    """Keep the pools of limited ranks small, since many mistakes leave ranks hanging, and end them after the last test
    of a lab.
    """
    for sandbox in (checks.SANDBOX, checks.GIVEN):
        sandbox.pool = SmallPools("grading.limited_rank", LARGEST + (1 << 20))
    yield
    checks.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Shorten the time limit, since many mistakes hang."""
    monkeypatch.setattr(checks, "LIMIT", 1.5)
