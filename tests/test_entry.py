"""The end of a job: one rank's end ends all, soon, with one message and, unless all agree, a non-zero status."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpi_impl.launch.entry import exit_status, say
from mpi_impl.launch.launcher import find_mpiexec
from mpi_impl.launch.status import LAUNCHER_FAILED
from tests.deep import one_fast_of
from tests.launching import MPI, SOON, command, environment, in_foreground, launch, write_program


def ends(tmp_path, main: str) -> subprocess.CompletedProcess:
    return launch(2, write_program(tmp_path, main))


def test_a_job_in_which_all_return_succeeds(tmp_path):
    """A child process of a rank may skip the shutdown."""
    job = ends(tmp_path, """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)     # by which Python 3.12 warns of a fork beside threads
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        wait()
        print(f'rank {rank} was here')
    """)
    assert (job.returncode, job.stderr) == (0, "")
    assert sorted(job.stdout.splitlines()) == ["rank 0 was here", "rank 1 was here"]


def test_a_rank_that_raises_ends_the_job_with_its_traceback(tmp_path):
    """Even what is not an Exception, as a library in Rust raises it."""
    job = ends(tmp_path, "if rank == 1: raise BaseException('a panic')\nwait()")
    assert job.returncode == 1
    assert job.stderr.count("Traceback") == job.stderr.count("BaseException: a panic") == 1
    assert "error: rank 1 of 2 failed with the traceback above; the job has been ended." in job.stderr


def test_when_all_ranks_raise_one_traceback_is_shown(tmp_path):
    """An error of the system that does not say that the machine is too small is a bug, and has a traceback too."""
    job = ends(tmp_path, "open('nowhere')")
    assert job.returncode == 1
    assert job.stderr.count("Traceback") == 1
    assert "error: rank 0 of 2 failed" in job.stderr


def test_a_user_error_on_all_ranks_is_one_sentence(tmp_path):
    job = ends(tmp_path, "raise UserError('--lr is -1, but must be positive.')")
    assert job.returncode == 2
    assert job.stderr.count("error: --lr is -1, but must be positive.\n") == 1
    assert "Traceback" not in job.stderr


def test_a_user_error_on_one_rank_names_the_rank(tmp_path):
    job = ends(tmp_path, "if rank == 1: raise UserError('The disk is full.')\nwait()")
    assert job.returncode == 2
    assert job.stderr.count("error on rank 1 of 2: The disk is full.\n") == 1
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize("asked, status", one_fast_of(2, [(0, 1), (3, 3)]))
def test_a_rank_that_leaves_while_others_work_ends_the_job(tmp_path, asked, status):
    job = ends(tmp_path, f"if rank == 1: sys.exit({asked})\nwait()")
    assert job.returncode == status
    sentence = f"error: rank 1 of 2 left the program by sys.exit({asked}) while other ranks were at work."
    assert job.stderr.count(sentence) == 1


@pytest.mark.deep
def test_when_all_ranks_leave_the_job_ends_as_asked_for(tmp_path):
    job = ends(tmp_path, "sys.exit('No data.')")
    assert job.returncode == 1
    assert job.stderr.startswith("No data.\n") and "error" not in job.stderr


@pytest.mark.parametrize("status, byte", [
    (0, 0), (3, 3), (255, 255), (256, 1), (-1, 255), (2**70, 1), (-2**70 + 5, 5)])
def test_no_failure_is_taken_for_success(status, byte):
    """The system keeps a status modulo 256."""
    assert exit_status(SystemExit(status)) == byte


def test_a_rank_that_skips_the_shutdown_ends_the_job(tmp_path):
    job = ends(tmp_path, "if rank == 1: os._exit(0)\nwait()")
    assert job.returncode == 1
    assert job.stderr.count("error: rank 1 of 2 left the program by os._exit(0).") == 1


def test_a_rank_that_shuts_down_cannot_be_asked_to_end(tmp_path):
    """By srun, for example, after another rank has failed in the same way."""
    job = ends(tmp_path, """
        import atexit
        atexit.register(os.kill, os.getpid(), signal.SIGTERM)
        raise UserError("A size is wrong.")
    """)
    assert (job.returncode, job.stderr) == (2, "error: A size is wrong.\n")


def test_a_rank_that_dies_without_a_word_is_told_by_launch(tmp_path):
    job = ends(tmp_path, "if rank == 1: os.kill(os.getpid(), 11)\nwait()")
    assert job.returncode in (11, 9, 11 | 9, 128 + 11, LAUNCHER_FAILED)     # by launcher, and by whom it had to kill
    assert job.stderr.count("a rank die") == 1


NO_MEMORY = "raise MemoryError('Unable to allocate 8 TiB')"
NO_ROOM = "raise OSError(28, 'No space left on device', '/a/b')"


@pytest.mark.parametrize("who, rank, end, sentence", one_fast_of(2, [
    ("rank == 1", 1, NO_MEMORY, "ran out of memory (Unable to allocate 8 TiB)."),
    ("True", 0, NO_ROOM, "failed with the file /a/b: No space left on device.")]))
def test_a_machine_that_is_too_small_is_a_sentence(tmp_path, who, rank, end, sentence):
    job = ends(tmp_path, f"if {who}: {end}\nwait()")
    assert job.returncode == 1
    assert job.stderr.count(f"error: rank {rank} of 2 {sentence}") == 1
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize("who", one_fast_of(2, ["rank == 1", "True"]))
def test_an_interrupted_job_says_so_in_a_line(tmp_path, who):
    job = ends(tmp_path, f"if {who}: raise KeyboardInterrupt\nwait()")
    assert job.returncode == 130
    assert job.stderr.count("Interrupted.\n") == 1
    assert "Traceback" not in job.stderr


PROGRAM = """
import os, signal
from mpi_impl.launch import entry
from mpi_impl.runtime.rank_environment import is_first_rank

def stop():
    if not is_first_rank():
        open(f"{folder}/{os.getpid()}.pid", "w")
        os.kill(os.getpid(), signal.SIGSTOP)

entry.SECONDS_TO_MEET, main = 2, print
{moment}
entry.run(main)
"""
IN_ITS_START = "entry.LAST_RESORT = 1; stop()"
AT_THE_MEETING = "entry.check_world_size = lambda *_: stop()"
AT_THE_END = "main = lambda: [stop(), entry.leave_within(2)]"


@pytest.mark.parametrize("moment, sentence", one_fast_of(2, [
    (AT_THE_MEETING, "error: rank 0 of 2 has waited 2 seconds for all ranks to come up."),
    (IN_ITS_START, "it waited too long for others"),
    (AT_THE_END, "it waited too long for others while the job came up or ended")]))
def test_a_rank_that_stops_before_or_after_the_work_ends_the_job(tmp_path, moment, sentence):
    """While MPI starts or shuts down, the system ends the ranks that wait, and launch tells of it. In between, they can
    tell it themselves.
    """
    (tmp_path / "program.py").write_text(PROGRAM.replace("{folder}", str(tmp_path)).replace("{moment}", moment))
    job = launch(2, tmp_path / "program.py")
    assert job.returncode and job.stderr.count("error:") == 1
    assert sentence in job.stderr or job.returncode == LAUNCHER_FAILED and "a rank dies" in job.stderr
    (stopped,) = tmp_path.glob("*.pid")
    assert not Path(f"/proc/{stopped.stem}").exists()


@pytest.mark.parametrize("program, closed, lines", [
    ("mpi_impl.launch -n 1 -m shardlab.plan", ">&-", 1), ("shardlab.plan", ">&-", 1),
    ("mpi_impl.pretrain_gpt", ">&- 2>&-", 0)])
def test_a_program_that_cannot_print_does_not_begin(tmp_path, program, closed, lines):
    """It ends with a sentence where somebody can read it, before the work is done and lost."""
    job = subprocess.run(["bash", "-c", f"exec {sys.executable} -m {program} {closed}"], cwd=tmp_path,
                         stderr=subprocess.PIPE, text=True, env=environment(), timeout=SOON)
    assert (job.returncode, job.stderr.count("\n")) == (2, lines)
    assert job.stderr.startswith("error: Standard output is closed" * lines)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device here is always full")
@pytest.mark.parametrize("program, unbuffered", [
    ("mpi_impl.launch -n 2 -m mpi_impl.launch.first_sum", ""), ("reference.schedules", ""), ("shardlab.demos", "1")])
def test_output_that_cannot_be_printed_is_an_error_in_a_sentence(program, unbuffered):
    with open("/dev/full", "w") as full:
        job = subprocess.run([sys.executable, "-m", *program.split()], stdout=full, stderr=subprocess.PIPE, text=True,
                             env=environment({"PYTHONUNBUFFERED": unbuffered}), timeout=SOON)
    assert job.returncode in (1, 2, 255) and "Traceback" not in job.stderr
    last = job.stderr.splitlines()[-1]      # after those of a launcher
    assert last.startswith("error: ") and " print" in last and ": No space left on device." in last


@pytest.mark.parametrize("program", ["mpi_impl.launch", "mpi_impl.pretrain_gpt"])
def test_a_program_whose_folder_is_gone_does_not_begin(tmp_path, program):
    (tmp_path / "gone").mkdir()
    line = f'rmdir "$PWD"; exec {sys.executable} -m {program} -n 1 -m shardlab.plan'
    job = subprocess.run(["bash", "-c", line], cwd=tmp_path / "gone", capture_output=True, text=True, timeout=SOON,
                         env=environment())
    assert job.returncode == 2 and "Traceback" not in job.stderr
    assert job.stderr.count("error: The folder in which this was started has been removed.") == 1  # MPI may say more


@pytest.mark.deep
def test_pictures_do_not_depend_on_a_backend(tmp_path):
    """A backend that does not exist would be found out when the work is done: matplotlib is imported then."""
    nonsense = {"MPLBACKEND": "nonsense"}
    picture = "from matplotlib.figure import Figure\nFigure().savefig(f'{os.path.dirname(__file__)}/picture.png')"
    assert command(write_program(tmp_path, picture), env=nonsense).returncode == 0
    job = command("-m", "shardlab.plot_schedule", "--output", tmp_path / "schedule.png", env=nonsense)
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize("text, said", [
    (f"--load {'x' * 100_000} is not there.", f"--load {'x' * 150}... (100,000 characters) is not there."),
    ("a " * 50_000, f"{'a ' * 5_000} ... (80,000 characters left out) ... {'a ' * 5_000}"),
    ("/a/path" * 40, "/a/path" * 40),
])
def test_what_is_too_long_to_read_is_shortened(capsys, text, said):
    say(text)
    assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.parametrize("told", [
    {"SHARDLAB_WORLD_SIZE": "4"},                          # by mpi_impl.launch
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"},    # by srun
])
def test_a_rank_that_is_a_world_of_its_own_is_refused(tmp_path, told):
    job = command(write_program(tmp_path, "wait()"), env=told)
    assert job.returncode == 2
    assert "error: 4 ranks were asked for, but each rank is a world of its own" in job.stderr
    assert (f"srun --mpi={MPI.srun}" in job.stderr) == ("SLURM_PROCID" in told)


def test_a_world_of_another_size_than_asked_for_is_refused(tmp_path):
    line = [find_mpiexec(MPI.name), "-n", "3", sys.executable, write_program(tmp_path, "wait()")]
    told = environment({"SHARDLAB_WORLD_SIZE": "4", **MPI.settings})
    job = subprocess.run(line, env=told, capture_output=True, text=True, timeout=SOON)
    assert job.returncode == 2
    assert job.stderr.count("error: 4 ranks were asked for, but the world has 3.") == 1


NOBODY_READS = "error: rank 0 of 1 cannot print: the reader of its output has left. Send it to a file, and read that.\n"


@pytest.mark.parametrize("by, left, status, said", [
    ("run_alone", True, 1, ""), ("run_alone", False, 130, "Interrupted.\n"), ("run", True, 1, NOBODY_READS)])
def test_a_program_of_one_process_ends_without_a_traceback(by, left, status, said):
    """Its reader leaves, or Ctrl-C is pressed."""
    program = f"""from mpi_impl.launch.entry import {by}
def main():
    while True:
        print('a line', flush=True)
{by}(main)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], env=environment(), stdout=pipe, stderr=pipe,
                          preexec_fn=in_foreground) as job:
        assert job.stdout and job.stdout.readline() == b"a line\n"
        job.stdout.close() if left else job.send_signal(signal.SIGINT)
        assert job.communicate(timeout=SOON)[1] == said.encode() and job.returncode == status
