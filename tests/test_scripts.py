"""A user's script ends as a whole, wherever it is started, and no more is said of its end than is known."""
import os
import sys

import pytest

from mpi_impl.launch import begin
from mpi_impl.launch.launcher import launch_environment
from mpi_impl.runtime.mpis import MPICH
from tests.deep import one_fast_of
from tests.launching import MPI, command, launch, write_script


@pytest.mark.parametrize("when", ["", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"])
@pytest.mark.parametrize("end, who, status, said", one_fast_of(2, [
    ("1 / 0", "== 1", 1, "error: rank 1 of 2 failed with the traceback above"),
    ("1 / 0", ">= 0", 1, "the traceback above"),
    ("sys.exit(9)", "== 1", 9, "error: rank 1 of 2 left the program by sys.exit(9), and the job has been ended"),
    ("sys.exit(9)", ">= 0", 9, ""), ("sys.exit('No data.')", "== 1", 1, "sys.exit('No data.')")]))
def test_a_script_that_knows_nothing_of_us_ends_as_a_whole(tmp_path, when, end, who, status, said):
    """Before MPI starts in it, too: the other rank waits there. A status is not taken for a signal."""
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\n{when}\nif int(os.environ[{MPI.rank_and_size[0]!r}]) {who}:\n    {end}\n"
                      "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()")
    job = launch(2, script)
    assert job.returncode == status and said in job.stderr and "signal" not in job.stderr
    assert job.stderr.count("Traceback") == (end == "1 / 0") and "begin.py" not in job.stderr


@pytest.mark.skipif(MPI != MPICH, reason="Others print no banner if a rank dies by a signal, or another one.")
@pytest.mark.parametrize("end, signaled", [("os.kill(os.getpid(), 9)", True), ("os._exit(9)", False)])
def test_a_status_is_not_reported_as_a_signal(tmp_path, end, signaled):
    script = tmp_path / "script.py"
    script.write_text(f"import os; from mpi4py import MPI; {end}")
    job = launch(2, script)
    assert job.returncode == 9 and ("died by signal 9" in job.stderr) == signaled
    assert ("with status 9, and no signal did" in job.stderr) != signaled


def test_ends_of_ranks_are_seen_in_a_folder_with_brackets(tmp_path, monkeypatch):
    (folder := tmp_path / "[reports]").mkdir()
    monkeypatch.setenv(begin.REPORTS, str(folder))
    assert all(begin.claim(f"{rank}.end") for rank in range(2)) and begin.all_left(2)


SOON_NAMED = ("from mpi_impl.launch import entry, launcher, reports; reports.LOOKS = 2; "
              "entry.run_alone(launcher.main)")
WAITS = "from mpi4py import MPI; comm = MPI.COMM_WORLD\nif comm.rank >= {first}: comm.Barrier(); comm.recv(source=0)\n"


@pytest.mark.parametrize("first, said", [(0, "  ranks 0 and 1: "), (1, "  rank 0: it has ended\n  rank 1: ")])
def test_ranks_that_wait_forever_are_named_with_their_lines(tmp_path, first, said):
    """All of them, or one whose partner has returned."""
    script = tmp_path / "script.py"
    script.write_text(WAITS.format(first=first))
    job = command("-c", SOON_NAMED, "-n", 2, "--timeout", 12, script)
    assert job.returncode == 124
    for head in ("found ranks at the same places:", "at the time limit, ranks were here:"):
        assert f"{head}\n{said}{script}, line 2 in <module>: if comm.rank" in job.stderr


def test_right_ranks_that_end_at_different_times_are_left_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time; from mpi4py import MPI\nif MPI.COMM_WORLD.rank: time.sleep(7)")
    job = command("-c", SOON_NAMED, "-n", 2, script)
    assert (job.returncode, job.stderr) == (0, "")


@pytest.mark.parametrize("variables", [
    {"SLURM_JOBID": "1", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODELIST": "n[1-2]",
     "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2"},
    {"PBS_JOBID": "1", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "/no/such/file"},
    {"LSB_JOBID": "1", "LSF_BINDIR": "/no", "LSB_HOSTS": "n1 n2", "LSB_MCPU_HOSTS": "n1 1 n2 1"},
    {"PE_HOSTFILE": "/no/such/file", "SGE_ROOT": "/no"}, {"COBALT_JOBID": "1", "COBALT_NODEFILE": "/no/such/file"}])
def test_variables_of_a_batch_system_that_is_not_here_start_ranks_here(variables):
    """As in a container inside of a job."""
    job = launch(2, "-m", "mpi_impl.launch.first_sum", env=variables | {"PATH": os.path.dirname(sys.executable)})
    assert (job.returncode, job.stdout) == (0, "1 + 2 = 3\n")


def test_hosts_of_a_user_or_of_a_reachable_batch_system_are_kept(tmp_path, monkeypatch):
    def settings():
        return launch_environment("MPICH", 2).get("HYDRA_RMK")

    monkeypatch.setenv("PBS_NODEFILE", "/no/such/file")
    monkeypatch.setenv("PATH", str(tmp_path))
    write_script(tmp_path / "ssh", "exit 0")
    assert settings() == "user"
    monkeypatch.setenv("HYDRA_LAUNCHER", "ssh")
    assert settings() is None
    monkeypatch.delenv("HYDRA_LAUNCHER")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "ssh"))
    assert settings() is None
