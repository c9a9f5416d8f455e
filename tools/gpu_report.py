"""The tests of tests/gpu on this machine's GPU, timings beside PyTorch's, and a report for a reader who is elsewhere.

    python -m tools.gpu_report [OPTIONS of pytest]            # CUDA_REPORT names the report: runs/test-cuda.txt

It takes at most eight minutes, however much fails or hangs. Every test has a limit, and those on ranks, which take
longest, come last. The report is written line by line, so it is there even if the machine is taken away: versions, each
test before it begins and after it has ended, the lines and local values of each failure, the stack of what hangs or
crashes, and the table of benchmarks/cuda_step.py.

As a plugin of pytest (`-p tools.gpu_report`) this module writes the part about the tests.
"""
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 480
OF_TIMINGS = 150        # of these, if the tests take all the others
OF_A_TEST = 90
REPORT, UNTIL = "CUDA_REPORT", "CUDA_TESTS_UNTIL"      # the variables that tell the plugin its file and its time
SLOW = "test_ranks", "test_run"
TESTS = ["-m", "pytest", "-p", "tools.gpu_report", "--tb=short", "--showlocals"]
HAS_PEER = "import sys, torch; sys.exit(not torch.cuda.is_available())"
ABOUT = """
import sys, cupy, importlib.metadata as found
from mpi4py import MPI
print(sys.version, MPI.Get_library_version().split(chr(10))[0], sep=chr(10))
print(*sorted({f"{one.name} {one.version}" for one in found.distributions() if one.name.lower().startswith((
    "cuda", "cupy", "hypothesis", "ml", "mpi", "numpy", "nvidia", "pytest", "torch"))}), sep=", ")
cupy.show_config()
"""


def main() -> int:
    path, begin = Path(os.environ.get(REPORT, ROOT / "runs/test-cuda.txt")).absolute(), time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    until = begin + SECONDS - OF_TIMINGS
    os.environ |= {REPORT: str(path), UNTIL: str(until), "PYTHONPATH": str(ROOT)}     # CUDA_PYTHON may not know us
    append(path, ["-c", ABOUT], 60)
    tests = limited([*TESTS, "--cuda", "tests/gpu", "tests/test_spy.py", *sys.argv[1:]], until + 20 - time.monotonic())
    peers = ",compiled,eager" if limited(["-c", HAS_PEER], 60, stderr=subprocess.DEVNULL) == 0 else ""
    timings = append(path, ["benchmarks/cuda_step.py", *"--layers 8 --rounds 1 --limit 110 --where --only".split(),
                            f"ours,graph{peers}"],
                     begin + SECONDS - time.monotonic())
    print(f"The report is in {path}")
    return tests or timings


def append(path: Path, arguments: list[str], seconds: float) -> int:
    """Let a Python write to the report."""
    print(f"{arguments[0]} writes to {path} ...", flush=True)
    with path.open("a") as report:
        status = limited(arguments, seconds, stdout=report, stderr=subprocess.STDOUT)
        report.write(f"(exit status {status})\n\n")
    return status


def limited(arguments: list[str], seconds: float, **where) -> int:
    """Run a Python; after this time abort it, so that it says where it is, and what it has started."""
    command = [sys.executable, "-X", "faulthandler", *arguments]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **where) as process:
        for end, grace in ((signal.SIGABRT, seconds), (signal.SIGKILL, 5)):
            try:
                return process.wait(grace)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, end)
        return process.wait()


class OutOfTime(BaseException):
    """A test has taken too long. (Of an Exception, hypothesis would try again.)"""


class Report:
    """The plugin's hooks."""

    def __init__(self, path: str, until: float):
        self.file, self.until, self.counts = open(path, "a", buffering=1), until, Counter[str]()   # noqa: SIM115

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self):
        faulthandler.enable(self.file)
        signal.signal(signal.SIGALRM, self.give_up)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: item.path.stem in SLOW)

    def pytest_runtest_logstart(self, nodeid):
        self.file.write(f"{nodeid}: ")
        self.file.flush()       # it may be the last that anybody hears of it

    def pytest_runtest_setup(self):
        if time.monotonic() > self.until:
            pytest.skip("the time for tests is over")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self):
        signal.setitimer(signal.ITIMER_REAL, max(1.0, min(OF_A_TEST, self.until - time.monotonic())))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def give_up(self, *_):
        raise OutOfTime("this test has taken too long")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
            why = report.longrepr[2] if report.skipped else ""
            self.file.write(f"{report.outcome}, {report.duration:.1f} s {why}\n")
        if report.failed:
            self.file.write("\n".join([report.longreprtext, *(text for _, text in report.sections), ""]))

    def pytest_warning_recorded(self, warning_message):
        self.file.write(f"warning: {warning_message.message}\n")

    def pytest_sessionfinish(self):
        self.file.write(f"{dict(self.counts)}\n\n")


def pytest_configure(config):
    config.pluginmanager.register(Report(os.environ[REPORT], float(os.environ[UNTIL])))


if __name__ == "__main__":
    sys.exit(main())
