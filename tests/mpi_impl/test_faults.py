"""A rank that stops or dies in the middle of a pipeline ends the job: soon, with one message, and no process stays."""
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpi_impl.data.indexed import write_indexed
from mpi_impl.launch import OPEN_MPI_SETTINGS
from tests.launching import environment

PATIENCE = 30       # seconds for a whole job, on a busy machine
SOON = 10           # seconds from a fault to the end of a job

OPTIONS = """--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1
    --global-batch-size 8 --train-iters 1000000 --log-interval 1000000 --eval-iters 0
    --tokenizer-type NullTokenizer --vocab-size 20""".split()

# The folder, a rank and its fate come first, then the program's own options.
PROGRAM = """\
import os, signal, sys, time
from itertools import count

from mpi_impl import pretrain_gpt
from mpi_impl.comm.group import world
from mpi_impl.entry import run
from mpi_impl.parallel.pipeline import Pipeline

folder, rank, fate = sys.argv[1], int(sys.argv[2]), sys.argv[3]
del sys.argv[1:4]
act, actions = Pipeline.act, count(1)

def act_until(self, action, function):
    if next(actions) == 30 and world().rank == rank:
        open(f"{folder}/fault", "w").write(str(time.time()))
        exec(fate)
    act(self, action, function)

Pipeline.act = act_until
open(f"{folder}/{os.getpid()}.pid", "w")
run(pretrain_gpt.main)
"""


@pytest.fixture
def job(tmp_path):
    """job(n, options, rank, fate, limit, bare): the job that has met this fate, after the promises that all keep."""
    write_indexed(tmp_path / "tokens", [np.arange(5000) % 20], 21)
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(n, options, rank, fate, limit=600.0, bare=False):
        start = [Path(sys.executable).with_name("mpiexec")] if bare else [sys.executable, "-m", "mpi_impl.launch"]
        line = [*start, "-n", str(n), *([sys.executable] * bare), tmp_path / "program.py", tmp_path, str(rank), fate,
                "--data-path", tmp_path / "tokens", *OPTIONS, *options.split(),
                "--distributed-timeout-minutes", str(limit / 60)]
        ended = to_its_end(line)
        took = time.time() - float((tmp_path / "fault").read_text())
        assert ended.returncode not in (0, None)
        assert len(list(tmp_path.glob("*.pid"))) == n and not any(map(alive, tmp_path.glob("*.pid")))
        assert took < SOON + (limit if fate == STOP else 0), ended.stderr
        return ended

    return run


def to_its_end(line) -> subprocess.CompletedProcess:
    """A job that hangs is ended, and so are its ranks, and the test fails."""
    with subprocess.Popen(line, env=environment(OPEN_MPI_SETTINGS), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        try:
            output, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.terminate()
    return subprocess.CompletedProcess(line, process.returncode, output, errors)


def alive(file: Path) -> bool:
    """Whether the rank that left this file is there; it has a moment to go, of which Open MPI takes some seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(int(file.stem), 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
P2, P4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
T2P2 = f"{P2} --tensor-model-parallel-size 2"


@pytest.mark.parametrize("n, options, stopped, bare", [
    (2, P2, 1, False),
    (4, f"{P4} --pipeline-schedule zb-h1", 0, True),
    (8, f"{T2P2} --num-layers-per-virtual-pipeline-stage 1", 5, False),
    pytest.param(8, T2P2, 2, True, marks=pytest.mark.deep),
    pytest.param(8, f"{P4} --pipeline-schedule gpipe", 7, False, marks=pytest.mark.deep),
    pytest.param(4, f"{T2P2} --verify", 0, False, marks=pytest.mark.deep),
    pytest.param(4, f"{P4} --trace-clock virtual --trace trace", 1, False, marks=pytest.mark.deep),
])
def test_a_stopped_rank_ends_the_job_when_the_time_is_up(job, tmp_path, n, options, stopped, bare):
    """One sentence, of a rank that waits for the stopped one, or for one that does; the stopped process goes, too."""
    stderr = job(n, options.replace(" trace", f" {tmp_path}/trace"), stopped, STOP, 1.8, bare).stderr
    (sentence,) = (line for line in stderr.splitlines() if "error:" in line)
    who, whom = sentence.split(" has waited for rank")
    assert "for 1.8 seconds (" in whom and "--distributed-timeout-minutes" in whom
    assert who != f"error: rank {stopped} of {n}" and (n > 2 or whom.startswith(f" {stopped} for"))
    assert "Traceback" not in stderr


@pytest.mark.parametrize("n, options, rank, fate, status, message", [
    (2, P2, 0, "os.kill(os.getpid(), signal.SIGKILL)", 9, "a rank died by signal 9 (SIGKILL)"),
    (4, P4, 2, "{}['missing']", 1, "rank 2 of 4 failed with the traceback above; the job has been ended."),
    (4, f"{P4} --pipeline-schedule zb-h2", 3, "os._exit(0)", 1, "rank 3 of 4 left the program by os._exit(0)."),
    pytest.param(4, T2P2, 1, "raise MemoryError", 1, "rank 1 of 4 ran out of memory.", marks=pytest.mark.deep),
    pytest.param(4, P4, 0, "os.kill(os.getpid(), signal.SIGSEGV)", 11, "a rank died by signal 11 (SIGSEGV)",
                 marks=pytest.mark.deep),
    pytest.param(8, f"{T2P2} --num-layers-per-virtual-pipeline-stage 1", 4, "sys.exit(3)", 3,
                 "rank 4 of 8 left the program by sys.exit(3) while other ranks were at work.",
                 marks=pytest.mark.deep),
])
def test_a_rank_that_dies_ends_the_job(job, n, options, rank, fate, status, message):
    """Within seconds, whatever it died of, and with one message."""
    ended = job(n, options, rank, fate)
    assert ended.returncode % 128 == status        # Open MPI adds 128 to a signal's number
    assert ended.stderr.count("error:") == 1 and message in ended.stderr
    assert ended.stderr.count("Traceback") == ("missing" in fate)


@pytest.mark.deep
def test_a_rank_that_is_slow_but_within_the_limit_harms_nobody(job):
    """It computes for half the time that there is; then it ends the job in its own way."""
    ended = job(4, P4, 2, "time.sleep(3); os._exit(5)", limit=6.0)
    assert ended.returncode == 5 and "left the program by os._exit(5)" in ended.stderr
