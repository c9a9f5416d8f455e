"""MPS, NVIDIA's Multi-Process Service, for ranks that share a GPU: `--mps` starts a daemon that ends with the job.

Without MPS, kernels of two processes take turns on a GPU. A kernel of a collective waits during its turn for kernels of
other ranks, which wait for theirs. With MPS they run at the same time.

    guard -> nvidia-cuda-mps-control -f -> nvidia-cuda-mps-server, once a rank asks for the GPU

The daemon stays in the foreground, as a child of the guard: then the guard is told when it fails, and the system tells
the daemon when the guard is killed. No setting of a GPU is changed.
"""
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from mpi_impl.launch.batch import suits_srun
from mpi_impl.launch.entry import say
from mpi_impl.launch.guard import JOB_FOLDER, end_descendants, end_with_parent, exit_on_signals, wait
from mpi_impl.runtime.tables import count
from reference.errors import UserError

PROGRAM = "nvidia-cuda-mps-control"     # the daemon, and the program that passes it commands
FOLDERS = "/usr/bin", "/usr/local/nvidia/bin"   # where drivers put it, which PATH may lack
PIPES, LOGS, SHARE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
QUESTION, QUIT = "get_default_active_thread_percentage", "quit"     # the first as NVIDIA's own tools ask for health
SECONDS_TO_START, SECONDS_TO_QUIT = 10.0, 5.0
LAST_LINES = 3          # of each log, in an error
WHERE_FROM = "It comes with NVIDIA's driver, in Ubuntu's package nvidia-compute-utils."
WITHOUT = "Or leave --mps out: ranks on one GPU then take turns, which is slower and changes no result."


def find_program() -> str | None:
    """Return the path of MPS's program; None if it is not on this machine."""
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path=os.pathsep.join(FOLDERS))


def own_daemon(ranks: int) -> list[str]:
    """Return the lines by which a shell starts a daemon for this many ranks on a GPU, and ends it."""
    program = PROGRAM if shutil.which(PROGRAM) else find_program()
    return [f"folder=$(mktemp -d /tmp/mps.XXXXXX); export {PIPES}=$folder {LOGS}=$folder",
            f"export {SHARE}={share_of(ranks)}; {program} -d",
            f"echo {QUIT} | {program}"]


def share_of(ranks: int) -> int:
    """Return the percentage of a GPU's multiprocessors for each of these ranks."""
    return max(1, 100 // ranks)


def check_mps(ranks: int, hostfile: str | None) -> None:
    """Raise UserError if `--mps` cannot serve these ranks."""
    here = "--mps starts a daemon that serves this machine only"
    if hostfile is not None:
        raise UserError(f"{here}, but --hostfile names others. Leave one of the two out.")
    if suits_srun(ranks) and shutil.which("srun"):
        raise UserError(f"{here}, but srun may start the ranks on others. On a single node, start this in a shell of "
                        f"that node, as in `srun --pty bash`. {WITHOUT}")
    if PIPES in os.environ:
        raise UserError(f"--mps would start a daemon, but {PIPES} names that of {os.environ[PIPES]}, which the ranks "
                        f"use as it is. Leave --mps out, or unset {PIPES}.")
    if find_program() is None:
        raise UserError(f"--mps needs {PROGRAM}, which is neither on PATH nor in {' or '.join(FOLDERS)}. "
                        f"{WHERE_FROM} {WITHOUT}")


@contextlib.contextmanager
def mps_daemon(ranks: int) -> Iterator[dict[str, str]]:
    """Start a daemon, yield the variables by which these ranks of this machine use it, and end it.

    Only a guard calls this. At the end all of its child processes are killed, since servers leave their parent.
    Raises UserError if the daemon does not start.
    """
    exit_on_signals()
    folder = Path(os.environ[JOB_FOLDER])
    settings = {PIPES: str(folder / "pipes"), LOGS: str(folder / "logs"),
                SHARE: os.environ.get(SHARE, str(share_of(ranks)))}
    with contextlib.ExitStack() as end:
        end.callback(shutil.rmtree, folder, ignore_errors=True)
        end.callback(end_descendants)
        environment = daemon_environment(settings)
        try:
            for path in (folder, settings[PIPES], settings[LOGS]):
                os.mkdir(path, 0o700)
            process = start(environment)
        except OSError as error:
            raise UserError(f"--mps cannot start its daemon: {error.filename}: {error.strerror}. {WITHOUT}") from error
        wait_for_answer(process, environment)
        end.callback(quit_daemon, process, environment)
        say(f"note: MPS lets the {count(ranks)} compute on the GPU at the same time; each of them may use "
            f"{settings[SHARE]} % of its multiprocessors ({SHARE}).")
        yield settings


def daemon_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the daemon's environment variables. It numbers the GPUs that it sees from 0, so that numbers
    in CUDA_VISIBLE_DEVICES would be applied twice, by the daemon and by the ranks. UUIDs mean the same to both.
    """
    environment = os.environ | settings
    if not environment.get("CUDA_VISIBLE_DEVICES", "").startswith(("GPU-", "MIG-")):
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment


def start(environment: Mapping[str, str]) -> subprocess.Popen:
    """Start the daemon. Its output is a log, too. Raises OSError."""
    with open(Path(environment[LOGS], "output.log"), "wb") as output:
        return subprocess.Popen([find_program() or PROGRAM, "-f"], env=environment, stdin=subprocess.DEVNULL,
                                stdout=output, stderr=output, preexec_fn=end_with_parent)


def wait_for_answer(daemon: subprocess.Popen, environment: Mapping[str, str]) -> None:
    """Wait until the daemon answers. Raises UserError, with the last lines of its logs, if it does not."""
    problem, deadline = f"did not answer within {SECONDS_TO_START:g} seconds", time.monotonic() + SECONDS_TO_START
    while (left := deadline - time.monotonic()) > 0:
        if tell(QUESTION, environment, left):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            problem = f"ended with status {wait(daemon, 0.05)}"
            break
    lines = [line for log in sorted(Path(environment[LOGS]).iterdir())
             for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:]]
    raise UserError(f"--mps started {PROGRAM}, which {problem}. It logged: {' | '.join(lines) or 'nothing'}. Look "
                    f"there for the cause. {WITHOUT}")


def tell(words: str, environment: Mapping[str, str], seconds: float) -> bool:
    """Pass the daemon a command, and report whether it has been carried out within these seconds."""
    process = subprocess.Popen([find_program() or PROGRAM], env=environment, stdin=subprocess.PIPE, bufsize=0,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert process.stdin
    try:
        process.stdin.write(f"{words}\n".encode())
        process.stdin.close()
        return wait(process, seconds) == 0
    except (BrokenPipeError, subprocess.TimeoutExpired):
        return False
    finally:
        process.kill()      # if it has not ended, perhaps since a signal ends the job


def quit_daemon(daemon: subprocess.Popen, environment: Mapping[str, str]) -> None:
    """Ask the daemon to end, with its servers, and wait for that."""
    if tell(QUIT, environment, SECONDS_TO_QUIT):
        with contextlib.suppress(subprocess.TimeoutExpired):
            wait(daemon, SECONDS_TO_QUIT)
