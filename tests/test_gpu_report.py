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
    time.sleep(60)

def test_comes_too_late():
    pass

def test_is_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GPUs are on Linux")
@pytest.mark.parametrize("chosen, seconds, expected", [
    ("not deaf", 2, ["test_fails: failed", "found      = 7", "test_hangs: failed", "too long", "time.sleep(60)",
                     "test_comes_too_late: skipped", "the time for tests is over", "'failed': 2"]),
    ("deaf", 1, ["test_is_deaf: ", "Fatal Python error: Aborted", "in test_is_deaf"])])
def test_it_has_what_happened(tmp_path, monkeypatch, chosen, seconds, expected):
    """The line and the values of what fails, where it hangs, and what did not run."""
    tests, report = tmp_path / "test_some.py", tmp_path / "report.txt"
    tests.write_text(TESTS)
    monkeypatch.setenv(gpu_report.REPORT, str(report))
    monkeypatch.setenv(gpu_report.UNTIL, str(time.monotonic() + 3 * seconds))
    status = gpu_report.limited([*gpu_report.TESTS, "-k", chosen, "--rootdir", str(tmp_path), str(tests)], 6 * seconds,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    said = report.read_text()
    assert status and all(part in said for part in expected), said
