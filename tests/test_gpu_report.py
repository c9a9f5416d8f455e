"""The report of ./run.sh test-cuda: it outlives failures, tests that hang, and a crash."""
import subprocess
import sys
import time

import pytest

from tools import gpu_report

TESTS = """
import os, signal, time

def test_fails():
    found = 7
    assert found == 6 + 2

def test_hangs():
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    time.sleep(60)

def test_aborts():
    os.abort()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GPUs are on Linux")
@pytest.mark.parametrize("left, expected", [
    (600, ["test_fails: failed", "found      = 7", "test_hangs: failed", "too long", "time.sleep(60)",
           "test_aborts: Fatal Python error: Aborted", "in test_aborts"]),
    (-1, ["test_fails: skipped", "the time for tests is over", "'skipped': 3"])])
def test_it_has_what_happened(tmp_path, monkeypatch, left, expected):
    """The line and the values of what fails, where it hangs or crashes, and what did not run."""
    tests, report = tmp_path / "test_some.py", tmp_path / "report.txt"
    tests.write_text(TESTS)
    monkeypatch.setenv(gpu_report.REPORT, str(report))
    monkeypatch.setenv(gpu_report.UNTIL, str(time.monotonic() + left))
    gpu_report.limited([*gpu_report.TESTS, "--rootdir", str(tmp_path), str(tests)], 60, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
    said = report.read_text()
    assert all(part in said for part in expected), said


def test_what_takes_too_long_is_aborted():
    assert gpu_report.limited(["-c", "import time; time.sleep(60)"], 0.5, stderr=subprocess.DEVNULL) < 0
