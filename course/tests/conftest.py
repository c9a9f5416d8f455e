"""Fixtures that the tests of labs share."""
import pytest

from course.grading import checks


@pytest.fixture(scope="package", autouse=True)
def fork_server():
    """End the server of limited ranks after the last test of a lab."""
    yield
    checks.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Shorten the time limit, since some mistakes compute without end."""
    monkeypatch.setattr(checks, "LIMIT", 3.0)
