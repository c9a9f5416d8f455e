"""A job of Slurm is the run without it, whatever happens to the job: it is preempted, is out of time, or loses a node.
The cluster is real in all that matters (slurm_cluster.py).
"""
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from mpi_impl.checkpoints.on_disk import tracked
from mpi_impl.data.indexed import write_indexed
from mpi_impl.launch.launcher import launch_environment, mpi_vendor
from tests.launching import ROOT, launch, write_program
from tests.slurm_cluster import NODES, Cluster, why_not

pytestmark = [pytest.mark.deep, pytest.mark.skipif(bool(why_not()), reason=why_not())]

SBATCH = ROOT / "docs" / "pretrain_gpt.sbatch"
OPTIONS = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1
    --global-batch-size 4 --log-interval 1 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 20
    --dtype float64 --train-iters 10000""".split()
HOSTS = "on 2 hosts: 2 ranks on node1, 2 ranks on node2\n"


@pytest.fixture
def cluster(tmp_path):
    """Start a cluster, with a corpus and this Python in its folder of jobs."""
    write_indexed(tmp_path / "tokens", [np.arange(5000) % 20], 21)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "cluster").mkdir()
    cluster = Cluster(tmp_path / "cluster")
    yield cluster
    cluster.end()


class Job:
    """Our batch script, on one or two nodes with two ranks each."""

    def __init__(self, cluster: Cluster, folder: Path, *options):
        self.cluster, self.folder = cluster, folder
        self.id = cluster.run("sbatch", "--parsable", "--nodes=1-2", "--ntasks-per-node=2", "--output=log", SBATCH,
                              *given(folder), *options, cwd=folder).strip()
        self.wait_for_iterations(2)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str, what: str) -> None:
        self.cluster.wait_for(lambda: text in self.log(), what)

    def wait_for_iterations(self, n: int) -> None:
        """Wait for the n-th iteration of the job's last start."""
        self.cluster.wait_for(lambda: len(losses(self.log().rpartition("element-wise")[2])) >= n, f"{n} iterations")

    def state(self) -> str:
        return re.findall(r"JobState=(\w+)", self.cluster.run("scontrol", "show", "job", self.id))[0]

    def cancel(self) -> None:
        self.cluster.run("scancel", self.id)
        self.cluster.wait_for(lambda: not self.cluster.run("squeue", "--noheader"), "the end of the job")
        assert self.state() == "CANCELLED"

    def resume(self) -> None:
        """Wait until the job has resumed by itself, and gone some way."""
        self.wait_for("loaded iteration", "a second start")
        self.wait_for_iterations(2)
        self.cancel()

    def set(self, **settings) -> None:
        changes = (f"{name}={value}" for name, value in settings.items())
        self.cluster.run("scontrol", "update", f"JobId={self.id}", *changes)


def given(folder: Path) -> list[str]:
    return [*OPTIONS, "--data-path", f"{folder}/tokens"]


def losses(output: str) -> list[tuple[str, ...]]:
    """Return each iteration's number, loss and gradient norm, as they are printed."""
    return re.findall(r"iteration +(\d+)/.* loss +([\d.]+) \| grad norm +([\d.]+)", output)


def undisturbed(folder: Path, iterations: int) -> list[tuple[str, ...]]:
    """Return those of a run without Slurm."""
    return losses(launch(1, "-m", "mpi_impl.pretrain_gpt", *given(folder), "--exit-interval", iterations).stdout)


def be_preempted(job: Job) -> None:
    """Let a job that has priority take all nodes for a moment."""
    job.cluster.run("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true")


def run_out_of_time(job: Job) -> None:
    """Set the end of the job to within the two minutes before which ranks are asked to stop."""
    job.set(TimeLimit=2)
    job.wait_for("stopped by SIGTERM", "the stop")
    job.set(TimeLimit=60)


@pytest.mark.parametrize("event", [be_preempted, run_out_of_time])
def test_a_job_that_is_asked_to_stop_loses_no_iteration(cluster, tmp_path, event):
    job = Job(cluster, tmp_path)
    event(job)
    job.resume()
    assert job.log().count("stopped by SIGTERM: --load runs/shardlab resumes after iteration") == 2     # and cancelled
    assert job.log().count("loaded iteration") == 1 and job.log().count(HOSTS) == 2
    seen = losses(job.log())
    assert seen == undisturbed(tmp_path, len(seen))


@pytest.mark.parametrize("node", NODES)
def test_a_job_that_loses_a_node_resumes_on_the_other(cluster, tmp_path, node):
    """The first node has the batch script and the launcher, too. Iterations since the last checkpoint are repeated."""
    job = Job(cluster, tmp_path, "--save-interval", "2")
    cluster.kill_node(node)
    if node == NODES[0]:
        cluster.wait_for(lambda: job.state() == "PENDING", "Slurm's discovery of the loss")
        job.set(NumTasks=1)
    else:
        job.wait_for(f"error: ranks on {node} have died without a word", "the launcher's discovery of the loss")
    job.resume()
    assert job.log().count(HOSTS) == 1 and "\n2 ranks" in job.log()
    seen = sorted(set(losses(job.log())), key=lambda one: int(one[0]))
    assert seen == undisturbed(tmp_path, len(seen))


def test_a_cancelled_job_saves_a_checkpoint_and_leaves_nothing(cluster, tmp_path):
    job = Job(cluster, tmp_path)
    job.cancel()
    cluster.wait_for(lambda: cluster.nodes("idle") == set(NODES), "nodes that have nothing left to do")
    assert tracked(str(tmp_path / "runs" / "shardlab")) == int(losses(job.log())[-1][0])


def test_sbatch_waits_for_the_end_of_a_run_or_a_sentence(cluster, tmp_path):
    """A job with a wrong option is not queued again."""
    submitted = ("sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", "--output=log", SBATCH, *given(tmp_path))
    cluster.run(*submitted, "--train-iters", 3, cwd=tmp_path)
    with pytest.raises(AssertionError):
        cluster.run(*submitted, "--train-iters", 2, cwd=tmp_path)
    log = (tmp_path / "log").read_text()
    assert len(losses(log)) == 3 and HOSTS in log and log.count("error: ") == 1


def test_salloc_and_srun_start_ranks(cluster, tmp_path):
    """`shardlab run` in an allocation knows how this MPI's ranks find one another; srun has to be told."""
    program = write_program(tmp_path, "if rank == 0: print(world().hosts().counted())")
    nodes = ("--nodes=2", "--ntasks-per-node=2")
    shardlab = (sys.executable, "-m", "mpi_impl.shardlab", "run", "-n", 4)
    assert HOSTS in cluster.run("salloc", *nodes, *shardlab, program)
    kind = launch_environment(mpi_vendor(), 4)["SLURM_MPI_TYPE"]
    assert HOSTS in cluster.run("srun", f"--mpi={kind}", *nodes, sys.executable, program)
    with pytest.raises(AssertionError, match=r"4 ranks were asked for, but each rank is a world of its own.*"
                                             r"Open MPI needs `srun --mpi=pmix`, the others `srun --mpi=pmi2`"):
        cluster.run("srun", "--mpi=none", *nodes, sys.executable, program)
