"""A node is lost if its lifeline breaks without a farewell, and in no other case."""
import os
import socket
import sys

import pytest

from mpi_impl.launch import lifelines
from mpi_impl.launch.lifelines import PORT, lifeline
from tests.launching import command, write_script
from tests.two_hosts import wait_for


@pytest.fixture
def lines(monkeypatch):
    """Open the launcher's end, and let this process be the first rank on node1."""
    lines = lifelines.Lifelines()
    slurm = {"SLURM_LOCALID": "0", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURMD_NODENAME": "node1"}
    for name, value in (slurm | lines.settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lifelines, "SECONDS_TO_REPORT", 0)
    return lines


def test_only_a_line_that_breaks_without_a_farewell_is_a_loss(lines):
    """Not one whose rank ends by an error, nor a stranger who connects and says nothing."""
    with pytest.raises(ZeroDivisionError), lifeline():
        raise ZeroDivisionError
    for name in (b"", b"node2"):
        with socket.create_connection(("127.0.0.1", int(os.environ[PORT]))) as line:
            line.sendall(name)
    lines.accept()
    wait_for(lambda: lines.lost == ["node2"], "the loss")


@pytest.mark.parametrize("name, value", [("SLURM_LOCALID", "1"), ("SLURM_LAUNCH_NODE_IPADDR", "nowhere.invalid")])
def test_a_rank_works_without_a_lifeline(lines, monkeypatch, name, value):
    """One rank on a node has it; and where it reaches nobody, it works, too."""
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket.socket, "sendall", None)
    with lifeline(), pytest.raises(BlockingIOError):
        lines.server.accept()


def test_a_lost_node_ends_the_job_with_a_sentence(tmp_path):
    """This srun waits for ever, as the real one does for minutes."""
    rank = f"import os, socket; socket.create_connection(('127.0.0.1', int(os.environ['{PORT}']))).sendall(b'node2')"
    write_script(tmp_path / "srun", f'"{sys.executable}" -c "{rank}"\nexec sleep 600')
    supervise = ("import os, sys; from mpi_impl.launch import launcher, lifelines; lifelines.SECONDS_TO_REPORT = 0; "
                 f"sys.exit(launcher.supervise([{str(tmp_path / 'srun')!r}], dict(os.environ), None))")
    job = command("-c", supervise)      # a process without other children, which a launcher takes for its own
    assert job.returncode == 1 and "error: ranks on node2 have died without a word" in job.stderr
