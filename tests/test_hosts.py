"""A run on two hosts is the run on one: started over ssh by one command, told of in its reports, and at an end, with a
sentence, when the link between the hosts is cut. The hosts are real in all that matters (two_hosts.py).
"""
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mpi_impl.checkpoints import on_disk
from mpi_impl.data.indexed import write_indexed
from mpi_impl.launch.launcher import find_mpiexec
from mpi_impl.runtime.mpis import MPICH, OPEN_MPI
from mpi_impl.runtime.rank_environment import THREAD_VARIABLES
from tests.deep import one_fast_of
from tests.launching import MPI, PREAMBLE, write_program
from tests.mpi_impl.test_kills import outcome
from tests.two_hosts import TwoHosts, wait_for, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

PATIENCE = 60       # seconds for a whole job, on a busy machine
LIMIT = 4           # seconds that a rank waits, where the link is cut
SOON = 15           # seconds from then to the end of every rank

OPTIONS = """--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1
    --global-batch-size 4 --log-interval 1 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 20
    --dtype float64""".split()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Start the hosts, with host files and a corpus."""
    folder = tmp_path_factory.mktemp("hosts")
    write_indexed(folder / "tokens", [np.arange(5000) % 20], 21)
    (folder / "hostfile").write_text("alpha slots=2    # where commands are given\nbeta:2\n")
    (folder / "strange").write_text("alpha:2\nstranger:2\n")
    (folder / "unknown").write_text("alpha:2\nnosuch.invalid:2\n")
    hosts = TwoHosts(folder)
    yield hosts
    hosts.end()


def launched(two, *arguments, hosts: str | None = "hostfile", **settings) -> subprocess.Popen:
    """Start four ranks from alpha."""
    file = ["--hostfile", two.folder / hosts] if hosts else []
    return two.start(sys.executable, "-m", "mpi_impl.launch", "-n", 4, *file, *arguments, **settings)


def ended(job: subprocess.Popen) -> tuple[int, str, str]:
    """Return a job's status, output and errors. A job that hangs fails the test."""
    output, errors = job.communicate(timeout=PATIENCE)
    return job.returncode, output, errors


def given(two) -> list:
    """Return the options that all runs have in common."""
    return [*OPTIONS, "--data-path", two.folder / "tokens"]


def trained(two, *options, hosts: str | None = "hostfile") -> str:
    """Return the output of a run that ends well."""
    status, output, errors = ended(launched(two, "-m", "mpi_impl.pretrain_gpt", *given(two), *options, hosts=hosts))
    assert status == 0 and not errors, errors
    return output


def losses(output: str) -> list[str]:
    """Return each iteration's loss and gradient norm, as they are printed."""
    return re.findall(r"loss +([\d.]+) \| grad norm +([\d.]+)", output)


@pytest.fixture(scope="module")
def on_one_host(two) -> str:
    return trained(two, "--train-iters", 3, "--tensor-model-parallel-size", 2, hosts=None)


def test_a_run_on_two_hosts_is_the_run_on_one(two, on_one_host):
    """Each has a tensor-parallel group, in which no byte leaves it; the replicas' gradients cross."""
    ledger = two.folder / "ledger.json"
    output = trained(two, "--train-iters", 3, "--tensor-model-parallel-size", 2, "--ledger", ledger, "--verbose")
    assert losses(output) == losses(on_one_host) and len(losses(output)) == 3
    assert "\non 2 hosts: 2 ranks on alpha, 2 ranks on beta\n" in output and "warning" not in output
    assert "2 hosts" not in on_one_host and "between hosts" not in on_one_host
    for line in json.loads(ledger.read_text()):
        inside, between = (line[f"ring_bytes_{where}_hosts"] for where in ("inside", "between"))
        assert inside + between == line["ring_bytes"]
        assert (inside if line["group"] == "data" else between) == 0
    assert "inside hosts  between hosts" in output


def test_ranks_are_placed_in_blocks_and_get_the_variables(two, tmp_path):
    """Those that launch sets, and the user's."""
    names = [*THREAD_VARIABLES, "GLIBC_TUNABLES", "SHARDLAB_WORLD_SIZE", "PYTHONPATH", "SHARDLAB_TEST"]
    program = write_program(tmp_path, f"""
        import socket
        print(rank, socket.gethostname(), os.getcwd(), *(os.environ.get(name) for name in {names}))
    """)
    status, output, errors = ended(launched(two, program, env={"SHARDLAB_TEST": "here"}))
    assert status == 0, errors
    found = [line.split(" ", 2) for line in sorted(output.splitlines())]
    assert [line[:2] for line in found] == [["0", "alpha"], ["1", "alpha"], ["2", "beta"], ["3", "beta"]]
    assert len({line[2] for line in found}) == 1 and "None" not in found[0][2]


@pytest.mark.deep
@pytest.mark.skipif(MPI == OPEN_MPI, reason="its launcher's options have other names")
def test_a_bare_mpiexec_does_it_too(two, tmp_path):
    (tmp_path / "hosts").write_text("alpha:2\nbeta:2\n")
    program = write_program(tmp_path, "if rank == 0: print(world().hosts().counted())")
    job = two.start(find_mpiexec(MPI.name), "-f", tmp_path / "hosts", "-n", 4, sys.executable, program)
    assert ended(job)[:2] == (0, "on 2 hosts: 2 ranks on alpha, 2 ranks on beta\n")


@pytest.mark.parametrize("hosts, folder, sentence", one_fast_of(3, [
    ("strange", ".", "The host stranger of --hostfile cannot be reached: "),       # it would ask for a password
    ("unknown", ".", "The host nosuch.invalid of --hostfile cannot be reached: Could not resolve hostname"),
    ("hostfile", "/dev/shm/alone", "The host beta of --hostfile has no "),             # a folder that only alpha has
]))
def test_a_host_that_cannot_be_used_is_a_sentence_within_seconds(two, tmp_path, hosts, folder, sentence):
    program = write_program(tmp_path, "print('started')")
    assert two.start("mkdir", "-p", folder).wait(SOON) == 0
    began = time.monotonic()
    status, output, errors = ended(launched(two, program, hosts=hosts, folder=folder))
    assert (status, output) == (2, "") and errors.count("\n") == 1 and sentence in errors
    assert time.monotonic() - began < SOON


# Each rank writes what it says into a file, too: nothing comes from the other side of a link that is cut.
TALKATIVE = PREAMBLE + """
from mpi_impl import pretrain_gpt
from mpi_impl.launch import entry

folder, say = sys.argv.pop(1), entry.say

def both(text):
    with open(f"{folder}/{os.environ['PMI_RANK']}.said", "a") as file:
        file.write(text)
    say(text)

entry.say = both
run(pretrain_gpt.main)
"""


@pytest.mark.deep
@pytest.mark.skipif(MPI != MPICH, reason="with other launchers not all of it ends within seconds")
def test_a_cut_link_ends_every_rank_and_the_run_goes_on(two, tmp_path):
    """On each side ranks say what they have waited for, and soon nothing of the job is left on either host, though no
    word gets across. When there is a link again, --load goes on, and comes to the weights of an undisturbed run.
    """
    (tmp_path / "program.py").write_text(TALKATIVE)
    options = ["--train-iters", 30, "--save-interval", 2, "--tensor-model-parallel-size", 2,
               "--pipeline-model-parallel-size", 2]
    saved, undisturbed = tmp_path / "saved", tmp_path / "undisturbed"
    job = launched(two, tmp_path / "program.py", tmp_path, *given(two), *options, "--save", saved,
                   "--distributed-timeout-minutes", LIMIT / 60)
    wait_for(lambda: (on_disk.tracked(str(saved)) or 0) >= 2, "a checkpoint", PATIENCE)
    two.cut()
    try:
        wait_for(lambda: job.poll() is not None, "the end of the job", LIMIT + SOON)
        whole = trained(two, *options, "--save", undisturbed, hosts=None)
        wait_for(lambda: not two.hosts[1].processes(), "the end of every rank", SOON)
        wait_for(lambda: not two.hosts[0].processes(), "the end of all that was left of the job", SOON)
    finally:
        two.mend()
    status, _, errors = ended(job)
    assert status not in (0, None) and "has waited for" in errors
    speakers = [int(path.stem) for path in tmp_path.glob("*.said")]
    assert min(speakers) < 2 <= max(speakers), "on each host"
    for path in tmp_path.glob("*.said"):
        assert re.match(rf"error: rank {path.stem} of 4 has waited for rank.* for {LIMIT} seconds", path.read_text())
    assert on_disk.tracked(str(saved)) < 30
    assert losses(trained(two, *options, "--save", saved, "--load", saved))[-1] == losses(whole)[-1]
    went_on, expected = outcome(saved), outcome(undisturbed)
    assert went_on.counters == expected.counters
    assert went_on.states.keys() == expected.states.keys()
    assert all((went_on.states[name] == expected.states[name]).all() for name in expected.states)


def test_an_interrupted_launch_ends_its_ranks_on_both_hosts(two, tmp_path):
    program = write_program(tmp_path, "wait()\nif rank == 0: print('ready')\ntime.sleep(600)")
    job = launched(two, program)
    assert job.stdout and job.stdout.readline() == "ready\n"
    # The first of two: the other is its guard.
    launcher = min(pid for pid, line in two.hosts[0].processes().items() if "mpi_impl.launch" in line)
    os.kill(launcher, signal.SIGINT)
    assert job.wait(SOON) == 130
    wait_for(lambda: not any(host.processes() for host in two.hosts), "the end of every process", SOON)
