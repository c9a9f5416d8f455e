"""Fixtures and options of all tests: a pool of ranks, and the number of examples that hypothesis draws."""
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import tests.one_thread  # noqa: F401
from mpi_impl.launching.pool import Pool
from tests.small_pools import SmallPools

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("fast", max_examples=12, deadline=None, print_blob=True, suppress_health_check=SLOW_IS_FINE)
settings.register_profile("deep", settings.get_profile("fast"), max_examples=400)


def pytest_addoption(parser):
    parser.addoption("--deep", action="store_true", help="run the tests marked deep too, and draw many more examples")
    parser.addoption("--cuda", action="store_true", help="run the tests of tests/gpu on this machine's GPUs")


def pytest_configure(config):
    config.addinivalue_line("markers", "deep: a test that takes long, and runs only with --deep")
    if config.getoption("cuda"):
        os.environ["SHARDLAB_TEST_CUDA"] = "1"
    settings.load_profile("deep" if config.getoption("deep") else "fast")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)     # of hundreds of processes, one compiles a module for all
    # A pair of ranks has a core each, and so would spin while it waits: but two workers share the cores.
    os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")


# A worker takes one file after the other. Those that take half a minute come first, so that no worker is left with one.
LONG = """notebooks/test_walkthroughs mpi_impl/test_training test_bug_zoo mpi_impl/test_pretrain_gpt
    mpi_impl/test_recording mpi_impl/test_exact test_spy_layers mpi_impl/test_mixed_precision test_hosts
    test_entry mpi_impl/test_faults labs/test_release labs/test_nbgrader labs/test_sandbox
    mpi_impl/test_demos mpi_impl/test_layers mpi_impl/test_memory mpi_impl/test_compare
    checkpoints/test_checkpoint mpi_impl/test_gantt mpi_impl/test_kills mpi_impl/test_zero test_pool
    mpi_impl/test_device mpi_impl/test_training_demos checkpoints/test_resumed_runs labs/test_grade
    mpi_impl/test_sample labs/test_canvas test_launch test_command generation/test_decoding
    generation/test_generate evaluation/test_fine_tuning evaluation/test_zero_shot data/prepare/test_prepare
    test_readme_commands test_base_install mpi_impl/test_prove mpi_impl/test_report mpi_impl/test_report_page""".split()


def place(item) -> int:
    name = str(item.path.relative_to(Path(__file__).parent).with_suffix(""))
    return LONG.index(name) if name in LONG else len(LONG)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items.sort(key=place)
    if not config.getoption("deep"):
        deep = [item for item in items if item.get_closest_marker("deep")]
        items[:] = [item for item in items if item not in deep]
        config.hook.pytest_deselected(items=deep)


@pytest.fixture(scope="session")
def ranks():
    """Start a pool of eight ranks: `ranks.run(4, function, *args)` runs `function(group, *args)` on four of them."""
    with Pool(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def small_pools():
    """Start pools for tests that leave ranks hanging: each run restarts no more ranks than it takes."""
    with SmallPools() as pools:
        yield pools
