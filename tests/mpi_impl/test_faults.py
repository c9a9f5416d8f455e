"""A rank that stops or dies in the midst of its work ends the job: soon, with one message, and no process stays."""
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from mpi_impl.checkpoints import on_disk
from mpi_impl.checkpoints.folder_lock import LOCK
from mpi_impl.checkpoints.on_disk import TRACKER, read_manifest
from mpi_impl.data.indexed import write_indexed
from mpi_impl.data.saved_tokenizer import SAVED
from mpi_impl.launch.launcher import find_mpiexec
from tests.deep import one_fast_of
from tests.launching import LAUNCHERS_WORDS, MPI, environment
from tests.program import pretrain

PATIENCE = 30       # seconds for a whole job, on a busy machine
SOON = 10           # seconds from a fault to the end of a job

OPTIONS = """--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1
    --global-batch-size 8 --train-iters 1000000 --log-interval 1000000 --eval-iters 0
    --tokenizer-type NullTokenizer --vocab-size 20""".split()

# The folder, a rank, its fate and the moment (the n-th call of what) come first, then the program's own options.
PROGRAM = """\
import os, resource, signal, sys, time
from itertools import count
from pkgutil import resolve_name

from mpi_impl import pretrain_gpt
from mpi_impl.comm.group import world
from mpi_impl.launch.entry import run

folder, rank, fate, what, last = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
del sys.argv[1:6]
function, calls = resolve_name(what), count(1)

def until_its_fate(*args):
    if next(calls) == last and world().rank == rank:
        open(f"{folder}/fault", "w").write(str(time.time()))
        exec(fate)
    return function(*args)

where, name = what.rsplit("." if "." in what.split(":")[1] else ":", 1)
setattr(resolve_name(where), name, until_its_fate)
open(f"{folder}/{os.getpid()}.pid", "w")
run(pretrain_gpt.main)
"""


@pytest.fixture
def job(tmp_path):
    """Return a function that runs a job in which a rank meets a fate, checks what every such job must satisfy, and
    returns the ended job.
    """
    write_indexed(tmp_path / "tokens", [np.arange(5000) % 20], 21)
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(n, options, rank, fate, moment=IN_THE_PIPELINE, limit=600.0, bare=False):
        start = [find_mpiexec(MPI.name)] if bare else [sys.executable, "-m", "mpi_impl.launch"]
        line = [*start, "-n", str(n), *([sys.executable] * bare), tmp_path / "program.py", tmp_path, str(rank), fate,
                *moment.split(), "--data-path", tmp_path / "tokens", *OPTIONS, *options.split(),
                "--distributed-timeout-minutes", str(limit / 60)]
        ended = to_its_end(line)
        took = time.time() - float((tmp_path / "fault").read_text())
        assert ended.returncode not in (0, None)
        assert len(list(tmp_path.glob("*.pid"))) == n and not any(map(alive, tmp_path.glob("*.pid")))
        assert took < SOON + (limit if STOP in fate else 0), ended.stderr
        return ended

    return run


def to_its_end(line) -> subprocess.CompletedProcess:
    """Run a job to its end. If it hangs, end it and its ranks, and fail."""
    with subprocess.Popen(line, env=environment(MPI.settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        try:
            output, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.terminate()
    return subprocess.CompletedProcess(line, process.returncode, output, LAUNCHERS_WORDS.sub("", errors))


def alive(file: Path) -> bool:
    """Wait for the end of the rank that left this file, of which Open MPI takes seconds; report whether it lives."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not psutil.pid_exists(int(file.stem)):
            return False
        time.sleep(0.05)
    return True


STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
FULL = "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"        # no room for what is written from now on
IN_THE_PIPELINE = "mpi_impl.parallel.pipeline:Pipeline.act 30"
P2, P4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"


@pytest.mark.parametrize("n, options, stopped, bare", one_fast_of(3, [
    (4, f"{P4} --pipeline-schedule zb-h1", 0, True), (2, P2, 1, False),
    (8, f"{P2} --tensor-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 5, False)]))
def test_a_stopped_rank_ends_the_job_when_the_time_is_up(job, n, options, stopped, bare):
    """One sentence, of a rank that waits for the stopped one, or for one that does; the stopped process goes, too."""
    stderr = job(n, options, stopped, STOP, limit=5.0, bare=bare).stderr
    (sentence,) = (line for line in stderr.splitlines() if "error:" in line)
    who, whom = sentence.split(" has waited for rank")
    assert "for 5 seconds (" in whom and "--distributed-timeout-minutes" in whom
    assert who != f"error: rank {stopped} of {n}" and (n > 2 or whom.startswith(f" {stopped} for"))
    assert "Traceback" not in stderr


LONG_WORK = "time.sleep(4); open(f'{folder}/prepared', 'w')"     # longer than the limit


@pytest.mark.parametrize("moment, fate", one_fast_of(3, [
    ("shardlab.programs.inputs:prepare 1", f"{LONG_WORK}; {STOP}"),
    ("shardlab.programs.pretraining:Pretraining.report_outcome 1", STOP),
    ("shardlab.programs.gpt:PretrainingGPT.conclude 1", f"{LONG_WORK}; {STOP}")]))
def test_the_limit_holds_from_the_first_meeting_to_the_last(job, tmp_path, moment, fate):
    """What takes long on one rank while it lives has no limit: it comes to its end; and then the rank stops."""
    stderr = job(2, "--exit-interval 1", 0, fate, moment, limit=1.8).stderr
    (sentence,) = (line for line in stderr.splitlines() if "error:" in line)
    assert "error: rank 1 of 2 has waited for rank 0 for 1.8 seconds (" in sentence and "Traceback" not in stderr
    assert (tmp_path / "prepared").exists() == (LONG_WORK in fate)


CHECKPOINT, FILES = "mpi_impl.checkpoints.checkpoint", "mpi_impl.checkpoints.on_disk"


@pytest.fixture
def checkpoint(job, ranks, tmp_path):
    """Save a checkpoint of iteration 1, for jobs on other ranks; return its folder."""
    ranks.run(1, pretrain, ["--data-path", f"{tmp_path}/tokens", *OPTIONS, "--exit-interval", "1", "--save",
                            f"{tmp_path}/D"])
    return tmp_path / "D"


@pytest.mark.deep
@pytest.mark.parametrize("n, stopped, moment, reason", [
    (4, 1, f"{CHECKPOINT}:save_shards 2", "the checkpoint's shards"),
    (4, 2, f"{CHECKPOINT}:load_piece 3", "the content of the checkpoint"),
    (2, 0, f"{FILES}:publish 1", "the checkpoint's manifest")])
def test_a_rank_that_is_stopped_while_it_saves_or_loads(job, checkpoint, n, stopped, moment, reason):
    """The others wait for it as long as they are told to, and the checkpoint that was there stays."""
    options = f"{P2} --zero-stage 1 --load {checkpoint} --save {checkpoint} --save-interval 1"
    stderr = job(n, options, stopped, STOP, moment, limit=5.0).stderr
    (sentence,) = (line for line in stderr.splitlines() if "error:" in line)
    assert f"for 5 seconds (world group: {reason})" in sentence and f"error: rank {stopped} of" not in sentence
    assert "Traceback" not in stderr and read_manifest(str(checkpoint)).iteration >= 1


def test_a_disk_that_is_full_ends_the_run(job, checkpoint):
    """On all ranks, with one sentence, which names the file; the checkpoint that was there stays, and loads."""
    file = "parameters-00001.safetensors"
    options = f"{P2} --zero-stage 1 --load {checkpoint} --save {checkpoint} --save-interval 1"
    ended = job(2, options, 1, FULL, f"{CHECKPOINT}:save_shards 1")
    assert ended.returncode == 2
    assert re.fullmatch(rf"error: {checkpoint}/iter_0000002\.\w+\.tmp/{file} cannot be written: File too large\.\n",
                        ended.stderr)
    assert sorted(os.listdir(checkpoint)) == ["iter_0000001", TRACKER, LOCK, SAVED]
    manifest = read_manifest(str(checkpoint))
    for name in manifest.files:
        on_disk.check_file(str(checkpoint), name, manifest)
