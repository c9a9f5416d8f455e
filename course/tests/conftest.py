"""Fixtures that the tests of labs share."""
import pytest

from course.grading import checks

# Files that take long, which the root's conftest.py would not put before others.
LONG = "test_mistakes test_nbgrader test_course test_labs test_canvas test_in_jupyterlab test_cheats".split()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="package", autouse=True)
def fork_server():
    """End the server of limited ranks after the last test of a lab."""
    yield
    checks.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Shorten the time limit, since some mistakes compute without end."""
    monkeypatch.setattr(checks, "LIMIT", 3.0)
