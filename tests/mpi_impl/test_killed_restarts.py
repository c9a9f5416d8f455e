"""A run whose ranks are killed again and again starts again by itself, and computes what an undisturbed one does."""
import json
import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from mpi_impl.data.indexed import write_indexed
from mpi_impl.launch.launcher import mpi_vendor
from tests.launching import write_script
from tests.mpi_impl.test_kills import Job, Topology, last_saved_iteration, outcome
from tests.two_hosts import wait_for

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="who is a rank is read in /proc")

KILLS, ITERATIONS = 50, 300
LONG = 600          # seconds for a start, on a busy machine
EIGHT = Topology(8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1")
FOUR = Topology(4, "--tensor-model-parallel-size 2 --zero-stage 2")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tokens"
    write_indexed(path, [np.random.default_rng(1).integers(0, 20, 3000)], 21)
    return path


def options(iterations: int, folder: Path) -> str:
    """Return the options of a run with few messages, which are slow on a busy machine."""
    return ("--num-layers 2 --micro-batch-size 2 "
            f"--train-iters {iterations} --lr-decay-iters {iterations} --save-interval 2 --eval-interval 7 "
            f"--log-interval 1 --metrics-file {folder}/metrics")


def curve(folder: Path) -> tuple[list[dict], list[dict]]:
    """Return all that a run has reported of its iterations, and of its evaluations, but for its speed."""
    rows = [json.loads(line) for line in (folder / "metrics").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]
    return [row for row in rows if "lm_loss" in row], [row for row in rows if "lm_loss" not in row]


def kill_a_rank(job: Job, moment: str, draw: random.Random) -> None:
    """Kill a rank of the present start: before or after it has begun to train, or in the middle of a checkpoint."""
    before = last_saved_iteration(job.root)
    wait_for(lambda: bool(job.ranks()), "the next start", LONG)
    if moment == "start":
        time.sleep(draw.uniform(0, 3))
    else:
        wait_for(lambda: last_saved_iteration(job.root) > before, "progress", LONG)
    if moment == "save":
        wait_for(lambda: any(job.root.glob("iter_*.tmp")), "another checkpoint", LONG)
    if moment == "work":
        time.sleep(draw.uniform(0, 0.1))
    killed = sorted(job.ranks())
    os.kill(draw.choice(killed), signal.SIGKILL)
    wait_for(lambda: job.ranks().isdisjoint(killed), "the end of all others", LONG)


@pytest.mark.deep
def test_ranks_that_are_killed_fifty_times_leave_the_curve_as_it_was(data, tmp_path):
    """The curve and all states are those of an undisturbed run, bit for bit."""
    draw, folders = random.Random(1), [tmp_path / "killed", tmp_path / "whole"]
    for folder in folders:
        folder.mkdir()
    job = Job(EIGHT, data, folders[0] / "D", KILLS, options(ITERATIONS, folders[0]))
    began = time.monotonic()
    for _ in range(KILLS):
        kill_a_rank(job, draw.choice(["start", "work", "save"]), draw)
    status, errors = job.end(LONG)
    job.output.seek(0)
    again = len(re.findall("iteration +[0-9]+/", job.output.read())) - ITERATIONS
    print(f"{KILLS} kills in {time.monotonic() - began:.0f} s; {again} iterations were repeated")
    assert status == 0, errors
    assert errors.count("error:") == errors.count("the job starts again") == KILLS, errors
    assert f"(restart {KILLS} of at most {KILLS})" in errors
    whole = Job(EIGHT, data, folders[1] / "D", 0, options(ITERATIONS, folders[1]))
    assert whole.end(LONG) == (0, "")
    (steps, evaluations), (expected_steps, expected_evaluations) = map(curve, folders)
    assert steps == expected_steps and len(steps) == ITERATIONS
    # An evaluation that follows a checkpoint of its iteration is lost if a rank dies between the two.
    assert all(row in expected_evaluations for row in evaluations) and evaluations[-1] == expected_evaluations[-1]
    found, expected = (outcome(folder / "D") for folder in folders)
    assert found.counters == expected.counters and found.states.keys() == expected.states.keys()
    assert all((found.states[name] == expected.states[name]).all() for name in expected.states)


# Runs the command here, as on another host, unless this one is lost. Its last words are the command.
SSH = """
while [ $# -gt 0 ]; do
    case "$1" in -o) shift 2;; -*) shift;; *) break;; esac
done
host=$1; shift
[ -e {folder}/$host.lost ] && {{ echo "$host is off" >&2; exit 255; }}
HOST_NAME=$host exec sh -c "$*"
"""


@pytest.mark.skipif(mpi_vendor() != "MPICH", reason="its launcher alone takes names of one machine for hosts")
def test_a_run_that_loses_a_host_goes_on_with_fewer_ranks(data, tmp_path, monkeypatch):
    """It is refused on the three ranks that are left, goes on with two, and the curve is the same up to rounding."""
    write_script(tmp_path / "ssh", SSH.format(folder=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("one:3\ntwo:1\n")
    folders = [tmp_path / "lost", tmp_path / "whole"]
    for folder in folders:
        folder.mkdir()
    job = Job(FOUR, data, folders[0] / "D", 1, options(24, folders[0]), tmp_path / "hosts")
    wait_for(lambda: last_saved_iteration(job.root) > 0, "a checkpoint", LONG)
    (tmp_path / "two.lost").touch()
    for pid in job.processes():
        with suppress(OSError):
            if "HOST_NAME=two" in Path(f"/proc/{pid}/environ").read_text():
                os.kill(pid, signal.SIGKILL)
    status, errors = job.end(LONG)
    assert status == 0, errors
    notes = [line for line in errors.splitlines() if line.startswith("note")]
    assert "The host two of --hostfile cannot be reached: two is off" in notes[0]
    assert notes[1:] == [
        f"note: the job starts again on {n} ranks (restart 1 of at most 1)." for n in (3, 2)]
    whole = Job(FOUR, data, folders[1] / "D", 0, options(24, folders[1]))
    assert whole.end(LONG) == (0, "")
    found, expected = (outcome(folder / "D") for folder in folders)
    assert found.counters == expected.counters
    for name, tensor in expected.states.items():
        np.testing.assert_allclose(found.states[name], tensor, 0, 1e-12, err_msg=name)
    for ours, theirs in zip(curve(folders[0])[0], curve(folders[1])[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
