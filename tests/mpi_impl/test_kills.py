"""A run whose ranks are killed at any moment ends at once, says why, and goes on: its weights are as if nothing was."""
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from mpi_impl.checkpoints.folder_lock import LOCK
from mpi_impl.checkpoints.manifest import file_of, key_of
from mpi_impl.checkpoints.on_disk import TRACKER, folder_of, read_manifest, tracked
from mpi_impl.data.indexed import write_indexed
from mpi_impl.data.saved_tokenizer import SAVED
from mpi_impl.launch.status import LAUNCHER_FAILED
from mpi_impl.runtime.mpis import INTEL_MPI
from mpi_impl.runtime.rank_environment import LAUNCHER_VARIABLES, mapped_by, shared_memory
from tests.deep import one_fast_of
from tests.launching import MPI, environment
from tests.mpi_impl.test_training import WITHOUT_V, places
from tests.program import pretrain

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="who is a rank is read in /proc")

ITERATIONS = 5
SOON = 10           # seconds from a kill to the end of the job
PATIENCE = 60       # seconds for a whole job, on a busy machine
ENOUGH = 30         # kills: the next job comes to its end
MARK = "SHARDLAB_TEST"
SIGNALS = 3 * [signal.SIGKILL] + [signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT]

OPTIONS = f"""--num-layers 8 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1
    --global-batch-size 8 --lr 0.01 --lr-warmup-iters 2 --adam-eps 1e-4 --train-iters {ITERATIONS} --save-interval 1
    --log-interval 1000 --eval-interval 3 --eval-iters 1 --split 8,2 --tokenizer-type NullTokenizer --vocab-size 20
    --dtype float64 --data-path""".split()


class Topology(NamedTuple):
    """The number of a job's ranks, and the options that divide the work between them."""

    n: int
    options: str


FIXED = Topology(4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1")


def any_topology(draw: random.Random) -> Topology:
    t, p, d = draw.choice([place for place in places(4) if 3 not in place and place != (1, 1, 1)])
    schedule = draw.choice([*WITHOUT_V, "interleaved"]) if p > 1 else "1f1b"
    return Topology(t * p * d, " ".join([
        f"--tensor-model-parallel-size {t} --pipeline-model-parallel-size {p} --zero-stage {draw.randrange(4)}",
        "--num-layers-per-virtual-pipeline-stage 1" if schedule == "interleaved" else f"--pipeline-schedule {schedule}",
        "--sequence-parallel" if t > 1 and draw.random() < 0.5 else ""]))


def last_saved_iteration(root: Path) -> int:
    """Return the last saved iteration; 0 if there is none."""
    return tracked(str(root)) or 0


class Job:
    """A run while it runs. All its processes have a mark in their environment, by which they are found."""

    def __init__(self, topology: Topology, data: Path, root: Path, restarts: int = 0, options: str = "",
                 hosts: Path | None = None):
        """Start a run, in which more options may replace the usual ones."""
        self.root = root
        line = [sys.executable, "-m", "mpi_impl.launch", "-n", str(topology.n), "--max-restarts", str(restarts),
                *(["--hostfile", hosts] if hosts else []), "-m", "mpi_impl.pretrain_gpt", *OPTIONS, data,
                *topology.options.split(), "--save", root, "--load", root, *options.split()]
        self.mark, self.memory = uuid.uuid4().hex, shared_memory()
        self.output, self.errors = TemporaryFile("w+"), TemporaryFile("w+")     # noqa: SIM115 - they end with the job
        self.launcher = subprocess.Popen(line, env=environment({**MPI.settings, MARK: self.mark}),
                                         stdout=self.output, stderr=self.errors)

    def processes(self) -> dict[int, bool]:
        """Return the pids of the job's living processes; each is mapped to whether it is a rank."""
        found = {}
        for process in psutil.process_iter(["environ"]):
            settings = process.info["environ"] or {}
            if settings.get(MARK) == self.mark:
                found[process.pid] = any(rank in settings for rank, _ in LAUNCHER_VARIABLES)
        return found

    def ranks(self) -> set[int]:
        """Return the pids of its ranks: with Intel MPI, of those that have started MPI, before which its launcher does
        not notice a death.
        """
        ranks = {pid for pid, is_rank in self.processes().items() if is_rank}
        return {pid for pid in ranks if "/dev/shm/" in text_of(f"/proc/{pid}/maps")} if MPI == INTEL_MPI else ranks

    def kill(self, draw: random.Random, iteration: int, seconds: float) -> int:
        """Kill a rank, or two, this many seconds after this iteration was saved -> by which signal; 0 if it is over."""
        while self.launcher.poll() is None and last_saved_iteration(self.root) < iteration:
            time.sleep(0.005)
        time.sleep(seconds)
        number, killed = draw.choice(SIGNALS), False
        while self.launcher.poll() is None and not killed:
            ranks = sorted(self.ranks())
            for pid in draw.sample(ranks, min(len(ranks), draw.choice([1, 1, 2]))):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                    killed = True
        return number if killed else 0

    def end(self, limit: float) -> tuple[int, str]:
        """Wait for the job's end, and check that no process and no shared memory of it is left. Return its status and
        stderr.
        """
        try:
            self.launcher.wait(limit)
        finally:
            left = self.processes()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        self.errors.seek(0)
        errors = self.errors.read()
        assert not left, f"processes stay: {left}\n{errors}"
        assert soon(lambda: not self.abandoned_memory()), f"memory stays: {self.abandoned_memory()}"
        return self.launcher.returncode, errors

    def abandoned_memory(self) -> set[str]:
        """Return the shared memory that was made since the start, and that no process maps any more."""
        made = shared_memory() - self.memory
        return made.difference(*(mapped_by(pid) for pid in os.listdir("/proc") if pid.isdigit()))


def text_of(path: str) -> str:
    """Return what the system says of a process, or "" if it is gone."""
    with suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def soon(condition) -> bool:
    """Wait a while for the condition, and report whether it is met: other jobs may be about to make such memory, too,
    or to free it.
    """
    deadline = time.monotonic() + SOON
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


class Outcome(NamedTuple):
    """The result of a run that has come to its end."""

    states: dict[str, np.ndarray]
    counters: tuple[int, int]


def outcome(root: Path) -> Outcome:
    """Return the content of the last checkpoint's files, joined to whole tensors."""
    manifest = read_manifest(str(root))
    folder = Path(folder_of(str(root), manifest.iteration))
    parts = {name: load_file(folder / name) for name in manifest.files}
    states = {}
    for state in ("parameters", "m", "v"):
        for name, tensor in manifest.tensors.items():
            whole = states[f"{state} {name}"] = np.full(tensor.shape, np.nan)
            for box, rank in tensor.boxes:
                whole[box] = parts[file_of(state, rank)][key_of(name, box)]
    return Outcome(states, (manifest.iteration, manifest.updates))


class Undisturbed(NamedTuple):
    """The corpus, and what the run on the fixed topology ends with."""

    data: Path
    outcome: Outcome


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_indexed(folder / "tokens", [np.random.default_rng(1).integers(0, 20, 3000)], 21)
    ranks.run(FIXED.n, pretrain, [*OPTIONS, f"{folder}/tokens", *FIXED.options.split(), "--save", f"{folder}/D"])
    return Undisturbed(folder / "tokens", outcome(folder / "D"))


@pytest.mark.parametrize("seed", one_fast_of(9, range(9)))
def test_a_run_that_is_killed_again_and_again(undisturbed, tmp_path, seed):
    """It goes on with the last checkpoint, on another topology each time."""
    draw, root, kills = random.Random(seed), tmp_path / "D", []
    while (before := last_saved_iteration(root)) < ITERATIONS:
        topology = any_topology(draw)
        job = Job(topology, undisturbed.data, root)
        last = draw.randint(before, ITERATIONS - (not kills))
        number = job.kill(draw, last, draw.uniform(0, 2 if last == before else 0.1)) if len(kills) < ENOUGH else 0
        status, errors = job.end(SOON if number else PATIENCE)
        after = last_saved_iteration(root)
        told = f"{topology} from iteration {before} to {after}, killed by {number}: status {status}\n{errors}"
        kills += [number] if number else []
        assert after >= before, told
        if status:
            assert number and errors.count("error:") == 1 and "Traceback" not in errors, told
            assert status == LAUNCHER_FAILED or f"({signal.Signals(number).name})" in errors, told
        else:       # a rank that has done all its work may be killed, too
            assert after == ITERATIONS and not errors, told
    assert kills, "nothing was killed"
    found, expected = outcome(root), undisturbed.outcome
    assert found.counters == expected.counters
    assert found.states.keys() == expected.states.keys()
    for name, whole in expected.states.items():
        np.testing.assert_allclose(found.states[name], whole, 0, 1e-10, err_msg=name)
    folders = [folder_of("", iteration) for iteration in range(1, ITERATIONS + 1)]
    assert sorted(os.listdir(root)) == [*folders, TRACKER, LOCK, SAVED], "something is left of what was not finished"
