"""A job of Slurm is the run without it, whatever happens to the job: it is preempted, is out of time, or loses a node.
The cluster is real in all that matters (slurm_cluster.py).
"""
import re
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from mpi_impl.comm.mpi_library import library
from mpi_impl.data.indexed import write_indexed
from tests.launching import MPI, ROOT, launch, write_program
from tests.slurm_cluster import NODES, Cluster, why_not

pytestmark = [pytest.mark.deep, pytest.mark.skipif(bool(why_not()), reason=why_not())]

SBATCH = ROOT / "docs" / "pretrain_gpt.sbatch"
OPTIONS = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1
    --global-batch-size 4 --log-interval 1 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 20
    --dtype float64 --train-iters 10000 --data-path tokens""".split()
TWO_NODES = ("--nodes=2", "--ntasks-per-node=2")
HOSTS = "on 2 hosts: 2 ranks on node1, 2 ranks on node2\n"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Start a cluster, in a folder with a corpus and this Python."""
    monkeypatch.chdir(tmp_path)
    write_indexed(tmp_path / "tokens", [np.arange(5000) % 20], 21)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    with TemporaryDirectory() as folder:       # whose path is short: Slurm's sockets have names of at most 108 bytes
        cluster = Cluster(Path(folder, "cluster"))
        yield cluster
        cluster.end()


class Job:
    """Our batch script, on nodes with two ranks each."""

    def __init__(self, cluster: Cluster, *options):
        """Submit a job, and wait until it has saved a checkpoint."""
        self.cluster = cluster
        self.id = cluster.run("sbatch", "--parsable", *TWO_NODES, *options, "--output=log", SBATCH, *OPTIONS,
                              "--save-interval", 2).stdout.strip()
        self.wait_for("saved iteration")

    def wait_for(self, text: str) -> None:
        self.cluster.wait_for(lambda: text in self.log(), text)

    def log(self) -> str:
        path = Path("log")
        return path.read_text() if path.exists() else ""

    def state(self) -> str:
        return re.findall(r"JobState=(\w+)", self.cluster.run("scontrol", "show", "job", self.id).stdout)[0]

    def set(self, change: str) -> None:
        self.cluster.run("scontrol", "update", f"JobId={self.id}", change)

    def cancel(self) -> None:
        self.cluster.run("scancel", self.id)
        self.cluster.wait_for(lambda: not self.cluster.run("squeue", "--noheader").stdout, "the end of the job")
        assert self.state() == "CANCELLED"

    def resume(self) -> list[tuple[str, ...]]:
        """Wait until the job has resumed by itself, and gone some way. Return the losses of all its starts."""
        self.wait_for("loaded iteration")
        self.cluster.wait_for(lambda: len(losses(self.log().split("loaded iteration")[1])) > 2, "iterations")
        self.cancel()
        return losses(self.log())


def losses(output: str) -> list[tuple[str, ...]]:
    """Return each iteration's number, loss and gradient norm, as they are printed."""
    return re.findall(r"iteration +(\d+)/.* loss +([\d.]+) \| grad norm +([\d.]+)", output)


def undisturbed(iterations: int) -> list[tuple[str, ...]]:
    """Return those of a run without Slurm."""
    return losses(launch(1, "-m", "mpi_impl.pretrain_gpt", *OPTIONS, "--exit-interval", iterations).stdout)


def be_preempted(job: Job) -> None:
    """Let a job that has priority take both nodes for a moment."""
    job.cluster.run("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true")


def run_out_of_time(job: Job) -> None:
    """Set the end of the job to within the two minutes before which ranks are asked to stop."""
    job.set("TimeLimit=2")
    job.wait_for("stopped by SIGTERM")
    job.set("TimeLimit=60")


@pytest.mark.parametrize("event", [be_preempted, run_out_of_time])
def test_a_job_that_is_asked_to_stop_loses_no_iteration(cluster, event):
    job = Job(cluster)
    event(job)
    seen = job.resume()
    assert "stopped by SIGTERM: --load runs/shardlab resumes after iteration" in job.log()
    assert job.log().count(HOSTS) == 2 and seen == undisturbed(len(seen))


@pytest.mark.parametrize("node", NODES)
def test_a_job_that_loses_a_node_resumes_on_the_other(cluster, node):
    """The first node has the batch script and the launcher, too. Iterations since the last checkpoint are repeated."""
    job = Job(cluster, "--nodes=1-2")
    cluster.kill(node)
    if node == NODES[0]:
        cluster.wait_for(lambda: job.state() == "PENDING", "Slurm's discovery of the loss")
        job.set("NumTasks=1")
    else:
        job.wait_for(f"error: ranks on {node} ")        # and maybe others, whose MPI has failed for that reason
    seen = sorted(set(job.resume()), key=lambda one: int(one[0]))
    assert job.log().count(HOSTS) == 1 and "\n2 ranks" in job.log() and seen == undisturbed(len(seen))


def test_a_cancelled_job_leaves_nothing_and_does_not_return(cluster, tmp_path):
    Job(cluster, f"--job-name={tmp_path.name}").cancel()
    cluster.wait_for(cluster.is_idle, "nodes that have nothing left to do")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):     # it is gone
            assert f"runs/{tmp_path.name}" not in path.read_text()


def test_a_job_ends_with_its_run_or_with_a_sentence(cluster):
    """A wrong option is no reason to return to the queue."""
    for iterations, status in [(3, 0), (2, 2)]:
        job = cluster.run("sbatch", "--wait", *TWO_NODES, "--output=log", SBATCH, *OPTIONS, "--train-iters", iterations)
        assert job.returncode == status
    log = Path("log").read_text()
    assert len(losses(log)) == 3 and HOSTS in log and len(re.findall("^error: .*--train-iters", log, re.M)) == 1


def test_salloc_and_srun_start_ranks(cluster, tmp_path):
    """`shardlab run` in an allocation knows how this MPI's ranks find one another; srun has to be told.

    Open MPI 4 ends ranks that cannot find one another before Shardlab can say why.
    """
    program = write_program(tmp_path, "if rank == 0: print(world().hosts().counted())")
    shardlab = (sys.executable, "-m", "shardlab", "run", "-n", 4)
    assert HOSTS in cluster.run("salloc", *TWO_NODES, *shardlab, program).stdout
    refusal = f"this MPI needs `srun --mpi={MPI.srun}`"
    if library().startswith("Open MPI 4"):
        refusal = 'direct launched using "srun"'
    for kind, stream, text in [(MPI.srun, "stdout", HOSTS), ("none", "stderr", refusal)]:
        assert text in getattr(cluster.run("srun", f"--mpi={kind}", *TWO_NODES, sys.executable, program), stream)
