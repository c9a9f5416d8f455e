"""A job that fails starts again, as often as is allowed; one that has ended in another way does not."""
import os
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from mpi_impl.data.indexed import write_indexed
from mpi_impl.launch import restarts
from mpi_impl.launch.hostfile import Host
from mpi_impl.launch.restarts import REFUSED, RESTARTS, numbers_of_ranks, run_with_restarts
from reference.errors import UserError
from shardlab.programs.settings import check_restarts, parse
from tests.launching import MPI, SOON, command, environment, in_foreground, write_program

ENDS = [0, 2, 75, 124, 130]     # done, refused, stopped on request, out of time, interrupted
FAILURES = st.integers(0, 255).filter(lambda status: status not in ENDS)
HOSTS = [Host("a", 4), Host("b", 4), Host("c", 4)]


def replayed(statuses, ranks=8, hosts=(), most=3, lost=()):
    """Return the last status, and what a job with these statuses was started on. `lost` has the hosts that each restart
    misses.
    """
    rest, starts, lost = iter(statuses), [], iter(lost)

    def run(n, left):
        starts.append((n, [host.name for host in left]))
        return next(rest)

    with mock.patch.object(restarts, "unreachable", lambda hosts: dict.fromkeys(next(lost, ()), "It is off.")):
        return run_with_restarts(run, ranks, hosts, most), starts


@given(st.lists(FAILURES, max_size=5), st.integers(0, 5))
def test_a_job_starts_until_it_ends_otherwise_or_as_often_as_is_allowed(failures, most):
    for end in ENDS:
        statuses = [*failures, end]
        status, starts = replayed([*statuses, None], most=most)
        assert starts == [(8, [])] * min(len(statuses), most + 1)
        assert status == statuses[len(starts) - 1]


def test_each_start_is_announced_and_so_is_the_end_of_all(capsys):
    assert replayed([9, 1, 9], most=2)[0] == 9
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == [f"note: the job starts again on 8 ranks (restart {k} of at most 2)." for k in (1, 2)]
    assert said[2].startswith("error: the job has failed again") and len(said) == 3
    replayed([9], most=0)
    replayed([9, 0], most=1)
    assert capsys.readouterr().err == said[0].replace("most 2", "most 1") + "\n"


def test_hosts_that_are_lost_drop_out_and_return(capsys):
    """A host without ranks takes the place of a lost one, and all are asked again before each start."""
    status, starts = replayed([9, 9, 9, 0], hosts=HOSTS, lost=[["b"], ["a", "c"], []])
    assert (status, starts) == (0, [(8, ["a", "b", "c"]), (8, ["a", "c"]), (4, ["b"]), (8, ["a", "b", "c"])])
    assert capsys.readouterr().err.count("note: It is off.\n") == 3


def test_a_job_without_hosts_waits_for_them_as_often_as_it_may_start():
    assert replayed([9, 0], hosts=HOSTS, lost=[["a", "b", "c"], []]) == (
        0, [(8, ["a", "b", "c"]), (8, ["a", "b", "c"])])
    assert replayed([9], hosts=HOSTS, lost=[["a", "b", "c"]] * 3) == (9, [(8, ["a", "b", "c"])])


def test_a_number_of_ranks_that_is_refused_is_followed_by_a_smaller_one():
    """That is one restart. A refusal of all of them, or of the first number itself, is the end."""
    lost = [["c"]] * 3
    numbers = [12, 8, 6, 4, 3, 2, 1]
    assert replayed([9, 2, 2, 9, 2, 0], 12, HOSTS, 2, lost)[1] == [
        (n, ["a", "b", "c"] if n == 12 else ["a", "b"]) for n in (12, 8, 6, 4, 8, 6)]
    status, starts = replayed([9, *[REFUSED] * 6], 12, HOSTS, 3, lost)
    assert status == REFUSED and [n for n, _ in starts] == numbers
    assert replayed([9, REFUSED], 12, HOSTS, 3)[1] == [(12, ["a", "b", "c"])] * 2


SIZES = st.sampled_from([1, 2, 3, 4])


def fits(ranks, t, p, c, m, batch) -> bool:
    """Report whether the program takes this number of ranks."""
    options = f"""--tensor-model-parallel-size {t} --pipeline-model-parallel-size {p} --context-parallel-size {c}
        --micro-batch-size {m} --global-batch-size {batch} --num-layers {2 * p} --hidden-size 48 --seq-length 48
        --num-attention-heads 12"""
    with suppress(UserError):
        parse(options.split(), ranks)
        return True
    return False


@given(SIZES, SIZES, st.sampled_from([1, 2]), st.integers(1, 6), SIZES, SIZES, st.integers(1, 96))
@example(2, 2, 1, 4, 1, 3, 11)
def test_a_run_fits_on_fewer_ranks_if_any_that_are_left_hold_its_model(t, p, c, d, m, accumulated, slots):
    """The numbers fall. All of them that hold whole models fit, but for the first, which may not divide the batch."""
    ranks, model = t * p * c * d, t * p * c
    batch = m * d * accumulated
    assert fits(ranks, t, p, c, m, batch)
    first, *others = numbers = list(numbers_of_ranks(ranks, slots))
    assert first == min(ranks, slots) and numbers == sorted(set(numbers), reverse=True)
    assert [n for n in others if fits(n, t, p, c, m, batch)] == [n for n in others if n % model == 0]
    assert any(fits(n, t, p, c, m, batch) for n in numbers) == (slots >= model)


# ---- on ranks -------------------------------------------------------------------------------------------------------


def started(tmp_path, main, *options) -> subprocess.CompletedProcess:
    """Run a program of two ranks whose `starts` is how often it has started."""
    program = write_program(tmp_path, f"""
        if rank == 0: open(f"{tmp_path}/{{time.time_ns()}}.start", "w")
        wait()
        starts = sum(name.endswith(".start") for name in os.listdir("{tmp_path}"))
    """ + main)
    return command("-m", "mpi_impl.launch", "-n", 2, *options, program)


def test_a_job_whose_rank_dies_starts_again_and_nothing_of_it_is_left(tmp_path):
    """The first start leaves a child in a session of its own, which the second does not find."""
    job = started(tmp_path, f"""
        if rank == 1 and starts == 1:
            if not (child := os.fork()):
                os.setsid()
                os.closerange(0, 1000)      # mpiexec would wait for what holds the dead rank's output
                time.sleep(600)
            open("{tmp_path}/child", "w").write(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        if starts == 2:
            raise ValueError("twice")
        wait()
        if rank == 0:
            child = int(open("{tmp_path}/child").read())
            print(starts, os.environ["{RESTARTS}"], os.path.exists(f"/proc/{{child}}"))
    """, "--max-restarts", 3)
    assert (job.returncode, job.stdout.strip()) == (0, "3 3 False"), job.stderr
    lines = [line for line in job.stderr.splitlines() if line.startswith(("error", "note"))]
    assert [line.split()[0] for line in lines] == ["error:", "note:"] * 2
    assert "ended" in lines[2]
    assert "SIGKILL" in lines[0] or MPI.name == "Intel MPI", lines[0]       # whose launcher does not tell


def test_the_time_limit_is_that_of_all_starts(tmp_path):
    """Each start alone takes less, but more than a hundredth of it."""
    job = started(tmp_path, """
        time.sleep(1)
        sys.exit(7)
    """, "--max-restarts", 100, "--timeout", 8)
    assert job.returncode == 124 and "within 8 seconds (--timeout)" in job.stderr, job.stderr
    assert "restart 1 of at most 100" in job.stderr and "Error" not in job.stderr


@pytest.mark.parametrize("number, status", [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.deep)])
def test_an_interrupted_job_does_not_start_again(tmp_path, number, status):
    program = write_program(tmp_path, "wait()\nprint('ready', flush=True)\ntime.sleep(600)")
    line = [sys.executable, "-m", "mpi_impl.launch", "-n", "2", "--max-restarts", "3", program]
    with subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=in_foreground) as job:
        assert job.stdout and job.stdout.readline() == "ready\n"
        job.send_signal(number)
        _, errors = job.communicate(timeout=SOON)
    assert job.returncode == status and "again" not in errors


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="nothing here is always full")
def test_a_job_whose_output_is_lost_does_not_start_again(tmp_path):
    program = write_program(tmp_path, "print('a line')\nwait()\ntime.sleep(600)")
    with open("/dev/full", "w") as full:
        job = subprocess.run([sys.executable, "-m", "mpi_impl.launch", "-n", "2", "--max-restarts", "3", program],
                             env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=SOON)
    assert job.returncode == 1 and "again" not in job.stderr


# ---- of a training run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, refused", [
    ("--save D --save-interval 2", True), ("--save D --load C --save-interval 2", True),
    ("--save D --load D", True), ("--save D --load ./D/ --save-interval 2", False)])
def test_a_run_that_could_not_resume_does_not_start(monkeypatch, options, refused):
    args = parse([*options.split(), "--micro-batch-size", "1"], 1).args
    check_restarts(args)
    monkeypatch.setenv(RESTARTS, "0")
    check_restarts(args)
    monkeypatch.setenv(RESTARTS, "1")
    with pytest.raises(UserError, match="--save") if refused else nullcontext():
        check_restarts(args)


def test_the_same_command_begins_a_run_and_resumes_it(tmp_path):
    """An empty folder is an error if the run would save elsewhere. A wrong option starts nothing again."""
    write_indexed(tmp_path / "tokens", [np.arange(500) % 20], 21)
    train = f"""-m mpi_impl.launch -n 1 --max-restarts 1 -m mpi_impl.pretrain_gpt --num-layers 2 --hidden-size 16
        --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --eval-iters 0 --tokenizer-type NullTokenizer
        --vocab-size 20 --data-path {tmp_path}/tokens --train-iters 4 --exit-interval 2""".split()
    folder = f"--save {tmp_path}/D --load {tmp_path}/D".split()
    first, second = (command(*train, *folder, "--save-interval", "2") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert f"{tmp_path}/D holds no checkpoint yet" in first.stdout and "loaded iteration 2" in second.stdout
    job = command(*train, *folder)
    assert job.returncode == 2
    assert job.stderr.startswith("error: --max-restarts lets a run") and job.stderr.count("\n") == 1
