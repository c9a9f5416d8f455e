"""What all tests share: a pool of ranks, and how many examples hypothesis draws."""
import pytest
from hypothesis import HealthCheck, settings

from mpi_impl.pool import Pool

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("fast", max_examples=50, deadline=None, print_blob=True, suppress_health_check=SLOW_IS_FINE)
settings.register_profile("deep", settings.get_profile("fast"), max_examples=400)


def pytest_addoption(parser):
    parser.addoption("--deep", action="store_true", help="run the tests marked deep too, and draw many more examples")


def pytest_configure(config):
    config.addinivalue_line("markers", "deep: a test that takes long, and runs only with --deep")
    settings.load_profile("deep" if config.getoption("deep") else "fast")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("deep"):
        deep = [item for item in items if item.get_closest_marker("deep")]
        items[:] = [item for item in items if item not in deep]
        config.hook.pytest_deselected(items=deep)


@pytest.fixture(scope="session")
def ranks():
    """A pool of eight ranks: `ranks.run(4, function, *args)` runs `function(group, *args)` on four of them."""
    with Pool(8) as pool:
        yield pool
