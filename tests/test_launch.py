"""One command starts ranks under any MPI, watches over them, and leaves none behind."""
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, strategies as st

from mpi_impl.checkpoints.on_disk import tracked
from mpi_impl.data.indexed import write_indexed
from mpi_impl.launch.entry import LAST_RESORT
from mpi_impl.launch.guard import ENDS, children
from mpi_impl.launch.launcher import find_mpiexec, launch_environment, launcher, limit_of, parse_options, supervise
from mpi_impl.launch.output import BANNER, Output, without_banner
from mpi_impl.launch.status import LAUNCHER_FAILED
from mpi_impl.runtime.rank_environment import THREAD_VARIABLES
from reference.errors import UserError
from tests.deep import one_fast_of
from tests.launching import (MPI, ROOT, SOON, command, environment, in_background, in_foreground, launch, launched,
                             write_program, write_script)


def pids(folder: Path) -> list[int]:
    """Return the processes that left a file of their name here."""
    return [int(path.stem) for path in folder.glob("*.pid")]


def wait_until(condition) -> bool:
    deadline = time.monotonic() + SOON
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


THREADS = f"print(*(os.environ.get(name) for name in {THREAD_VARIABLES[:2]}))"


@pytest.fixture
def threads_unset(monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_rank_has_one_blas_thread_unless_the_user_says_otherwise(tmp_path, threads_unset):
    """With a bare mpirun, too; a program that is started by itself keeps all."""
    program = write_program(tmp_path, THREADS)
    assert launch(2, program, env={"OMP_NUM_THREADS": "3"}).stdout == "None 3\n" * 2
    assert command(program).stdout == "None None\n"
    line = [find_mpiexec(MPI.name), "-n", "2", sys.executable, program]
    job = subprocess.run(line, env=environment(MPI.settings), capture_output=True, text=True, timeout=SOON)
    assert job.stdout == "1 1\n" * 2


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is told of a parent's death")


# Each rank may have a child in a session of its own, which holds on to the rank's output and would outlive it.
FAMILY = """
    if {with_children} and not os.fork():
        os.setsid()
    open(f"{folder}/{os.getpid()}.pid", "w")
    time.sleep(60)
"""


@pytest.fixture
def family(tmp_path):
    """Start a job of two ranks in `with family(with_children):`; assert at its end that all its processes are gone."""
    @contextmanager
    def start(with_children=True, place=in_foreground, options=()):
        main = FAMILY.replace("{folder}", str(tmp_path)).replace("{with_children}", str(with_children))
        program = write_program(tmp_path, main)
        with launched(2, program, place, options) as job:
            try:
                assert wait_until(lambda: len(pids(tmp_path)) == 2 + 2 * with_children)
                yield job
                assert wait_until(lambda: not any(map(psutil.pid_exists, pids(tmp_path)))), "processes stay"
            finally:
                for pid in filter(psutil.pid_exists, pids(tmp_path)):
                    os.kill(pid, signal.SIGKILL)
    return start


@LINUX
@pytest.mark.parametrize("number, status", one_fast_of(2, [(signal.SIGKILL, -9), (signal.SIGINT, 130)]))
def test_an_interrupted_launch_leaves_no_process(family, number, status):
    with family() as job:
        job.send_signal(number)
        assert job.wait(SOON) == status


def test_a_launch_in_the_background_goes_on_until_it_is_asked_to_end(family):
    """It ignores SIGINT and SIGHUP, as `nohup` asks, and ends with SIGTERM."""
    with family(False, in_background) as job:
        job.send_signal(signal.SIGINT)
        job.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(1)
        job.send_signal(signal.SIGTERM)
        assert job.wait(SOON) == 143


def test_a_shell_that_ignores_its_children_gets_the_status(tmp_path):
    """The signal's disposition is inherited, and the system keeps no status of a child that nobody wants to hear of."""
    ignoring = "import os, sys; from signal import *; signal(SIGCHLD, SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    program = write_program(tmp_path, "sys.exit(3)")
    job = command("-c", ignoring, sys.executable, "-m", "mpi_impl.launch", "-n", 2, program)
    assert (job.returncode, job.stderr) == (3, "")


SIGNAL_WHILE_LOCKED = """
import os, signal, subprocess, threading
from mpi_impl.launch.launcher import supervise

class Lock:
    def __init__(self):
        self.lock, self.release, self.signals = threading.Lock(), self.__exit__, [signal.SIGTERM]
    def acquire(self, *waits):
        taken = self.lock.acquire(*waits)
        if self.signals:
            os.kill(os.getpid(), self.signals.pop())
        return taken
    def __enter__(self):
        self.lock.acquire()
    def __exit__(self, *_):
        self.lock.release()

subprocess.threading = type("", (), {"Lock": Lock})
supervise(["sleep", "60"], dict(os.environ), None)
"""


def test_a_signal_that_comes_while_a_wait_holds_its_lock_ends_the_job():
    assert command("-c", SIGNAL_WHILE_LOCKED).returncode == 143


@LINUX
@pytest.mark.parametrize("depth, sentence", one_fast_of(3, [
    (1, "error: the process that guards the job died by signal 9"), (2, "which died by signal 9 (SIGKILL)"),
    (3, "error: a process of the launcher")]))
def test_a_killed_launcher_leaves_no_process(family, depth, sentence):
    """It is launch's guard, the MPI's mpiexec below it, or the process that starts the ranks."""
    if MPI.name != "MPICH" and depth == 3:
        pytest.skip("there it is a rank")
    with family() as job:
        victim = job.pid
        for _ in range(depth):
            (victim,) = children(victim)
        os.kill(victim, signal.SIGKILL)
        _, errors = job.communicate(timeout=SOON)
        assert job.returncode not in (0, None) and errors.count("error:") == 1 and sentence in errors


@LINUX
def test_a_process_whose_main_thread_is_dead_is_ended_with_its_children(tmp_path):
    """It is a zombie then, with a child."""
    job = command("-c", f"""if True:
        import ctypes, os, psutil, threading, time
        from mpi_impl.launch.guard import leaving_nothing
        with leaving_nothing():
            if not (child := os.fork()):
                if not (its_child := os.fork()):
                    time.sleep(60)
                open("{tmp_path}/child", "w").write(str(its_child))
                threading.Thread(target=time.sleep, args=(60,)).start()
                ctypes.CDLL(None).pthread_exit(None)
            while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
        print(psutil.pid_exists(int(open("{tmp_path}/child").read())))
    """)
    assert (job.stdout, job.stderr) == ("False\n", "")


@LINUX
def test_a_single_rank_that_is_stopped_is_told_once_and_goes_on(tmp_path):
    """Nobody else waits for it."""
    program = write_program(tmp_path, "print(os.getpid())\nos.kill(os.getpid(), signal.SIGSTOP)\nprint('on')")
    with launched(1, program) as job:
        assert job.stdout and job.stderr
        pid = int(job.stdout.readline())
        assert job.stderr.readline().startswith(f"note: process {pid} of the job has been stopped")
        os.kill(pid, signal.SIGCONT)
        assert job.communicate(timeout=SOON) == ("on\n", "") and job.returncode == 0


def test_the_time_limit_ends_even_ranks_that_ignore_signals(tmp_path):
    program = write_program(tmp_path, f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f'{tmp_path}/{{os.getpid()}}.pid', 'w')
        while True:
            time.sleep(1)
    """)
    quickly = ("from mpi_impl.launch import entry, launcher; launcher.SECONDS_TO_STOP = 1; "
               "entry.run_alone(launcher.main)")
    job = command("-c", quickly, "-n", 2, "--timeout", 8, program)
    assert job.returncode == 124
    assert job.stderr.endswith("error: the job did not end within 8 seconds (--timeout), and has been ended.\n")
    assert len(pids(tmp_path)) == 2
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids(tmp_path))))


@pytest.fixture
def keep_handlers(monkeypatch):
    """Leave this process's signals as they are, though launch wants them."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.mark.parametrize("status, said", [
    (3, ""), (9, "or a rank died by signal 9 (SIGKILL)"),
    (139, "or a rank died by signal 11 (SIGSEGV)"), (255, "failed with status 255")])
def test_launch_says_no_more_of_a_status_than_is_known(capsys, keep_handlers, status, said):
    """It has nothing to add to a status that was asked for, and does not end without a word where a launcher fails."""
    assert supervise([sys.executable, "-c", f"raise SystemExit({status})"], dict(os.environ), None) == status
    told = capsys.readouterr().err
    assert said in told and bool(said) == bool(told) and ("Either a rank" in told) == ("or a rank" in said)


@LINUX
@pytest.mark.parametrize("depth", one_fast_of(1, [2, 3, 4]))
def test_the_time_limit_of_a_program_ends_a_job_that_is_stopped(family, monkeypatch, depth):
    """It is mpiexec, the process that starts the ranks, or a rank, of which no other one is waiting."""
    with family(False, options=["--distributed-timeout-minutes", "0.01"]) as job:
        victim = job.pid
        for _ in range(depth):
            victim = min(children(victim))
        os.kill(victim, signal.SIGSTOP)
        assert f"process {victim} of the job has been stopped by a signal for longer" in job.communicate(timeout=60)[1]
        assert job.returncode == 1


def test_the_last_time_limit_of_a_command_line_counts():
    words = ["-n", "2", "-m", "mpi_impl.pretrain_gpt"]
    for minutes in ("1", "5"):
        words += ["--distributed-timeout-minutes", minutes]
    assert limit_of(parse_options(words)) == 5 * 60 + LAST_RESORT


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)    # as in the foreground
class Hook:
    def find_spec(self, name, *_):
        if name == "mpi_impl.launch.entry":
            os.kill(os.getpid(), 2)
sys.meta_path.insert(0, Hook())
"""


@pytest.mark.parametrize("module", ["mpi_impl.launch", "shardlab"])
def test_an_interrupt_while_a_command_imports_is_a_line(tmp_path, module):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    job = command("-m", module, "--help", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (job.returncode, job.stderr) == (130, "Interrupted.\n")


def test_no_banner_comes_before_the_sentence(tmp_path):
    program = write_program(tmp_path, "print('at work')\nwait()\nif rank == 1: os.kill(os.getpid(), 9)\nwait()")
    job = launch(3, program)
    assert job.returncode in (9, 128 + 9, LAUNCHER_FAILED) and job.stdout.split() == 3 * ["at", "work"]
    assert re.match("error: .*a rank (died by signal 9|dies)", job.stderr)


@given(lines=st.lists(st.sampled_from([b"=" * 83, b"=" * 82, b"", b"loss 1", BANNER.splitlines()[1]])),
       banner=st.booleans(), data=st.data())
def test_what_comes_before_the_banner_is_passed_on_in_whatever_blocks_it_comes(lines, banner, data):
    before = b"".join(line + b"\n" for line in lines)
    while BANNER in before:     # what surrounded one may be another
        before = before.replace(BANNER, b"")
    text = before + banner * (BANNER + b"=   PID 1\n")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    blocks = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    passed, banners = zip(*without_banner(blocks))
    assert b"".join(passed) == before and banners[-1] == text[len(before):]
    passed, _ = zip(*without_banner([b"a bar: ===", b"==\n"]))
    assert passed == (b"a bar: ===", b"==\n", b""), "not passed on immediately"


def test_a_signal_that_ends_a_job_is_for_the_main_thread():
    """Another one that takes it would let it through to the main thread, even while that has it blocked."""
    class Masked(Output):
        def run(self):
            self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    output = Masked(None)
    output.start()
    output.finish()
    assert output.blocked >= set(ENDS) and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_launcher_of_another_mpi_is_passed_over(tmp_path, monkeypatch):
    for folder, says in [("a", "mpiexec (Open MPI) 5.0.11"), ("b", "HYDRA build details:")]:
        write_script(tmp_path / folder / "mpiexec", f"echo '{says}'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_mpiexec("MPICH") == str(tmp_path / "b" / "mpiexec")
    assert find_mpiexec("Open MPI") == str(tmp_path / "a" / "mpiexec")
    with pytest.raises(UserError, match="of another MPI"):
        find_mpiexec("Intel MPI")


def test_a_program_that_has_called_mpi_can_start_ranks():
    """Its children get what MPI has put into its environment, which Python's own view of it has not."""
    job = command("-c", """if True:
        import subprocess, sys
        from mpi4py import MPI
        subprocess.run([sys.executable, "-m", "mpi_impl.launch", "-n", "2", "-m", "mpi_impl.launch.first_sum"])
    """)
    assert (job.stdout, job.stderr) == ("1 + 2 = 3\n", "")


def test_a_launcher_does_not_inherit_what_would_mislead_it(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_ess", "singleton")
    assert launch_environment("MPICH", 2).keys() - launch_environment("Open MPI", 2).keys() >= {"OMPI_MCA_ess"}


def test_a_caller_of_a_pool_can_be_a_rank_itself():
    """It has asked for the name of its MPI, and so loaded it without a start."""
    job = command("-c", "from mpi_impl.launch.launcher import mpi_vendor; mpi_vendor();"
                        "from mpi_impl.comm.group import world; print(world().allgather_objects('here'))")
    assert (job.stdout, job.stderr) == ("['here']\n", "")


def test_several_nodes_of_slurm_are_started_by_srun(tmp_path, monkeypatch):
    write_script(tmp_path / "srun", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert launcher("MPICH", 16) == ["srun", "-n", "16"]
    assert launch_environment("MPICH", 16)["SLURM_MPI_TYPE"] == "pmi2"
    assert launch_environment("Open MPI", 16)["SLURM_MPI_TYPE"] == "pmix"
    monkeypatch.setenv("SLURM_MPI_TYPE", "cray_shasta")
    assert launch_environment("MPICH", 16)["SLURM_MPI_TYPE"] == "cray_shasta"


@pytest.mark.parametrize("ranks, step, by_srun", [(8, None, True), (4, None, False), (8, "0", False)])
def test_all_ranks_of_a_job_on_one_node_are_started_by_srun(tmp_path, monkeypatch, ranks, step, by_srun):
    """Slurm's signals reach them then. In a step, srun would wait for its end."""
    write_script(tmp_path / "srun", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    if step:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    assert (launcher(MPI.name, ranks)[0] == "srun") == by_srun


def test_a_status_of_srun_is_not_taken_for_a_lack_of_memory(tmp_path, capfd):
    """It has the same one where it could not start a rank."""
    write_script(tmp_path / "srun", "exit 137")
    assert supervise([str(tmp_path / "srun")], dict(os.environ), None) == 137
    said = capfd.readouterr().err
    assert "srun could not start one" in said and "memory" not in said


SBATCH = ROOT / "docs" / "pretrain_gpt.sbatch"


def test_the_batch_script_trains_and_goes_on(tmp_path):
    """An srun that starts ranks here shows that its options for pretrain_gpt are right, and that a second job resumes.
    tests/test_slurm.py has the rest.
    """
    subprocess.run(["bash", "-n", SBATCH], check=True)
    write_script(tmp_path / "bin" / "srun", f'exec {find_mpiexec(MPI.name)} "$@"')
    (tmp_path / ".venv").symlink_to(sys.prefix)
    options = f"""--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1
        --global-batch-size 2 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 20
        --data-path {tmp_path}/tokens --train-iters""".split()
    write_indexed(tmp_path / "tokens", [np.arange(500) % 20], 21)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "shardlab", "SLURM_JOB_NUM_NODES": "2",
             "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for iterations in ("2", "4"):
        job = subprocess.run(["bash", SBATCH, *options, iterations], env=environment({**MPI.settings, **slurm}),
                             capture_output=True, text=True, timeout=SOON)
        assert job.returncode == 0, job.stderr
    assert "loaded iteration 2" in job.stdout and tracked(str(tmp_path / "runs" / "shardlab")) == 4
