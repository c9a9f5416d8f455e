"""What the tests of labs share."""
import pytest

from grading import checks


@pytest.fixture(scope="package", autouse=True)
def limited_ranks():
    """They are ended after the last test of a lab."""
    yield
    checks.SANDBOX.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Mistakes that hang are to take no longer than needed."""
    monkeypatch.setattr(checks, "LIMIT", 1.5)
