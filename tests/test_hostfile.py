"""A host file is read in either format, filled in order, and written for any MPI; what is wrong gets a sentence."""
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.data.indexed import write_indexed
from mpi_impl.launch import hostfile
from mpi_impl.launch.hostfile import OTHER_MEANS, Host, check_reachable, fill_hosts, format_for, is_here, read_hosts
from mpi_impl.launch.launcher import export_arguments, find_mpiexec, launch_environment, launcher, machinefile
from mpi_impl.runtime.mpis import KNOWN, MPICH, OPEN_MPI
from reference.errors import UserError
from tests.launching import MPI, command, write_script

HOSTS = st.lists(st.tuples(st.from_regex("[a-z][a-z0-9.-]{0,5}", fullmatch=True), st.integers(1, 9)), min_size=1,
                 max_size=5, unique_by=lambda host: host[0]).map(lambda hosts: [Host(*host) for host in hosts])


@given(HOSTS, st.sampled_from(KNOWN), st.data())
def test_a_file_of_either_kind_is_read_and_written_for_any_mpi(tmp_path_factory, hosts, mpi, data):
    """Comments, blank lines and spaces do not count; and a file written for a launcher reads as the same hosts."""
    path = tmp_path_factory.getbasetemp() / "hosts"
    spellings = ["{} slots={}", "{}:{}", "  {}\tslots = {}  # four", "# who\n\n{}:{}"]
    path.write_text("\n".join(data.draw(st.sampled_from(spellings)).format(*host) for host in hosts) + "\n")
    assert read_hosts(str(path)) == hosts
    path.write_text(format_for(mpi.name, hosts))
    assert read_hosts(str(path)) == hosts
    assert ("slots=" in path.read_text()) == (mpi == OPEN_MPI)


@given(HOSTS, st.data())
def test_hosts_are_filled_one_after_the_other(hosts, data):
    """The i-th rank is on the host of the i-th slot; a host that gets no rank is not named."""
    slots = [host.name for host in hosts for _ in range(host.slots)]
    ranks = data.draw(st.integers(1, len(slots)))
    filled = fill_hosts(hosts, ranks, "hosts")
    assert [host.name for host in filled for _ in range(host.slots)] == slots[:ranks] and all(n for _, n in filled)


def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path):
    (tmp_path / "hosts").touch()
    os.truncate(tmp_path / "hosts", 20 * 10**9)
    with pytest.raises(UserError, match=f"^--hostfile {tmp_path}/hosts has 20,000,000,000 bytes"):
        read_hosts(str(tmp_path / "hosts"))


@pytest.mark.parametrize("status, words, sentence", [
    (255, "ssh: Could not resolve hostname node2.", "node2 of --hostfile cannot be reached: Could not resolve"),
    (255, "", "cannot be reached: its status is 255."), (1, "", f"node2 of --hostfile has no {sys.executable}")])
def test_a_host_that_cannot_be_used_is_a_sentence(tmp_path, monkeypatch, status, words, sentence):
    """Whatever ssh says; and hosts that answer are not spoken of."""
    use_ssh(tmp_path, monkeypatch, f'case "$*" in *" node2 "*) echo "{words}" >&2; exit {status};; esac')
    check_reachable([Host("node1", 1), Host("localhost", 1)])
    with pytest.raises(UserError) as refused:
        check_reachable([Host("node1", 1), Host("node2", 1)])
    assert sentence in str(refused.value)


def test_many_hosts_are_asked_some_at_a_time(tmp_path, monkeypatch):
    """All of them, up to the last, and never more together than were to be: each holds a file open."""
    monkeypatch.setattr(hostfile, "ASKED_TOGETHER", 3)
    together, ask = [], hostfile.ask
    monkeypatch.setattr(hostfile, "ask", lambda hosts, test: together.append(hosts) or ask(hosts, test))
    use_ssh(tmp_path, monkeypatch, 'case "$*" in *" node7 "* | *" node1 "*) exit 255;; esac')
    hosts = [Host(f"node{i}", 1) for i in range(8)]
    assert list(hostfile.unreachable(hosts)) == ["node1", "node7"]
    with pytest.raises(UserError, match="node7 .* cannot be reached"):
        check_reachable(hosts[2:])
    assert together[:3] == [["node0", "node1", "node2"], ["node3", "node4", "node5"], ["node6", "node7"]]


def test_a_host_that_does_not_answer_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(hostfile, "SECONDS_TO_ANSWER", 0.1)
    use_ssh(tmp_path, monkeypatch, "exec sleep 60")
    with pytest.raises(UserError, match="node1 .* cannot be reached: it has not answered within 0.2 seconds"):
        check_reachable([Host("node1", 1)])


def use_ssh(folder, monkeypatch, script: str) -> None:
    """Replace ssh by a script."""
    write_script(folder / "ssh", script)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in OTHER_MEANS:
        monkeypatch.delenv(name, raising=False)


def test_without_ssh_there_is_a_sentence_and_with_other_means_none(monkeypatch, tmp_path):
    use_ssh(tmp_path, monkeypatch, "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="--hostfile names node1, which is reached by ssh, but ssh is not installed"):
        check_reachable([Host("localhost", 1), Host("node1", 1)])
    monkeypatch.setenv("HYDRA_LAUNCHER", "slurm")
    check_reachable([Host("node1", 1)])


def test_this_machine_is_known_by_its_names():
    assert is_here("localhost") and is_here("127.0.0.1")
    assert not is_here("192.0.2.1") and not is_here("nosuch.invalid")       # addresses and names that nobody has


def test_a_launcher_gets_a_file_of_its_own_while_it_runs():
    with machinefile("MPICH", [Host("node1", 2), Host("node2", 1)]) as path:
        assert path and Path(path).read_text() == "node1:2\nnode2:1\n"
        assert launcher(MPI.name, 3, path)[1:] == ["-machinefile", path, "-n", "3"]
    assert not os.path.exists(path)
    with machinefile("MPICH", []) as path:
        assert path is None


def test_a_host_file_comes_before_srun(tmp_path, monkeypatch):
    write_script(tmp_path / "srun", "")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert launcher(MPI.name, 4)[0] == "srun"
    assert launcher(MPI.name, 4, "hosts")[0]== find_mpiexec(MPI.name)


@pytest.mark.parametrize("mpi", KNOWN, ids=lambda mpi: mpi.name)
def test_ssh_is_told_to_ask_nothing_and_a_launcher_what_to_take_along(monkeypatch, mpi):
    """On several hosts only, and where it does not take all variables along. The user's own words to ssh are kept."""
    first, *others = mpi.ssh_options
    monkeypatch.setenv(first, "-p 2222")
    monkeypatch.setenv("PYTHONPATH", "/here")
    monkeypatch.setenv("HOSTNAME", "alpha")
    environment, alone = launch_environment(mpi.name, 4, True), launch_environment(mpi.name, 4)
    assert environment[first] == "-p 2222" and all("BatchMode=yes" in environment[name] for name in others)
    assert not alone.keys() & set(others) and all(environment[name] == to for name, to in mpi.fill_hosts.items())
    arguments = export_arguments(mpi.name, environment)
    assert bool(arguments) == bool(mpi.export) and set(arguments[::2]) <= {mpi.export}
    if mpi.export:
        assert {"PYTHONPATH", "GLIBC_TUNABLES", "SHARDLAB_WORLD_SIZE"} <= set(arguments) and "HOSTNAME" not in arguments


@pytest.mark.skipif(MPI != MPICH, reason="its launcher alone starts ranks on a host that is not there")
def test_a_machine_under_two_names_is_two_hosts(tmp_path):
    """Where no other host is to be had: what a run says of them, and of a tensor-parallel group that they split."""
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    write_indexed(tmp_path / "tokens", [np.arange(500) % 20], 21)
    options = """--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1
        --train-iters 1 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 20""".split()
    job = command("-m", "mpi_impl.launch", "-n", 4, "--hostfile", tmp_path / "hosts", "-m", "mpi_impl.pretrain_gpt",
                  *options, "--tensor-model-parallel-size", 4, "--data-path", tmp_path / "tokens",
                  "--ledger", tmp_path / "ledger.json", env={"HYDRA_LAUNCHER": "fork"})
    assert job.returncode == 0, job.stderr
    assert "\non 2 hosts: 2 ranks on " in job.stdout
    assert "\nwarning: 1 of 1 tensor-parallel groups of 4 ranks split between hosts" in job.stdout
    for line in json.loads((tmp_path / "ledger.json").read_text()):
        whole, between = line["ring_bytes"], line["ring_bytes_between_hosts"]
        assert line["ring_bytes_inside_hosts"] + between == whole
        if line["operation"] == "all_reduce":
            assert between == whole / 2     # of a ring of four, two edges cross
