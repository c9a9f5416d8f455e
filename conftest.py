"""Fixtures and options of all tests: a pool of ranks, and the number of examples that hypothesis draws."""
import gc
import os
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path
from zlib import crc32

import mpi4py
import pytest
from hypothesis import HealthCheck, Phase, settings

import tests.one_thread  # noqa: F401
from mpi_impl.kernels.fused import core
from mpi_impl.launch.pool import Pool
from mpi_impl.runtime.mpis import YIELDING
from tests.small_pools import SmallPools

# An import of MPI does not start it: to Open MPI 4, workers that a process with MPI starts would be ranks of its job.
mpi4py.rc.initialize = False

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("fast", max_examples=30, deadline=None, print_blob=True, suppress_health_check=SLOW_IS_FINE)
# On a GPU time is short: the first example that fails will do.
settings.register_profile("cuda", settings.get_profile("fast"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("deep", settings.get_profile("fast"), max_examples=100)


def pytest_addoption(parser):
    parser.addoption("--deep", action="store_true", help="run the tests marked deep too, and draw many more examples")
    parser.addoption("--slice", type=lambda text: tuple(map(int, text.split("/"))), default=(1, 1), metavar="K/N",
                     help="run the tests of one slice, the Kth of N: a test's name decides where it is")
    parser.addoption("--cuda", action="store_true", help="run the tests of tests/gpu on this machine's GPUs")


def pytest_configure(config):
    config.addinivalue_line("markers", "deep: a test that takes long, and runs only with --deep")
    if config.getoption("cuda"):
        os.environ["SHARDLAB_TEST_CUDA"] = "1"
    settings.load_profile(next((name for name in ("deep", "cuda") if config.getoption(name)), "fast"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)     # of hundreds of processes, one compiles a module for all
    # A pair of ranks has a core each, and so would spin while it waits: but several workers share the cores.
    os.environ.update(YIELDING | os.environ)
    # Of nbformat's dependencies, this one takes a second to build grammars of web addresses, which nobody checks here.
    sys.modules.setdefault("rfc3987_syntax", None)


def pytest_sessionstart(session):
    """Compile the kernels of all formats, which takes a minute once on a machine: no test's limit counts it."""
    if not hasattr(session.config, "workerinput"):
        with ThreadPool(os.cpu_count()) as threads:
            threads.map(core.works, ("float64", "float32", *core.HALVES))


# A worker takes one file after the other. Those that take long come first, so that no worker is left with one; those
# that compute stand between those that wait, so that the cores are busy.
LONG = """test_launch mpi_impl/test_training mpi_impl/test_dry_run mpi_impl/test_prediction test_entry
    reference/test_theorems test_readme_commands notebooks/test_walkthroughs mpi_impl/test_recording
    mpi_impl/test_layers mpi_impl/test_faults mpi_impl/test_collectives test_hosts gpu/test_ranks
    checkpoints/test_checkpoint test_microshard mpi_impl/test_prove mpi_impl/test_pretrain plan/test_candidates
    mpi_impl/test_memory mpi_impl/test_forecast test_pool evaluate/test_fine_tuning mpi_impl/test_waits
    mpi_impl/test_compare checkpoints/test_huggingface mpi_impl/test_experiments mpi_impl/test_demos
    mpi_impl/test_timelines mpi_impl/test_kills test_refusals checkpoints/test_resumed_runs evaluate/test_zero_shot
    test_bug_matrix
    generate/test_decoding mpi_impl/test_kernels test_command notebooks/test_ranks_magic test_bug_zoo gpu/test_kernels
    test_benchmarks mpi_impl/test_device mpi_impl/test_mixed_precision""".split()


def place(item) -> int:
    name = str(item.path.relative_to(Path(__file__).parent).with_suffix("")).replace("tests/", "")
    return LONG.index(name) if name in LONG else len(LONG)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items.sort(key=place)
    deep, (k, n) = config.getoption("deep"), config.getoption("slice")
    chosen = [item for item in items
              if (deep or not item.get_closest_marker("deep")) and crc32(item.nodeid.encode()) % n == k - 1]
    config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage among a million objects of tests while they are made, nor later: all of them stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def ranks():
    """Start a pool of eight ranks: `ranks.run(4, function, *args)` runs `function(group, *args)` on four of them."""
    with Pool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Write paragraphs of sentences; return the options that name them and a cache of tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    sentences = [f"Here {i} times {i % 7} is {i * (i % 7)}." for i in range(400)]
    (folder / "text.txt").write_text("\n\n".join(" ".join(sentences[i:i + 12]) for i in range(0, 400, 12)))
    return ["--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]


@pytest.fixture(scope="module")
def small_pools():
    """Start pools for tests that leave ranks hanging: each run restarts no more ranks than it takes."""
    with SmallPools() as pools:
        yield pools
