"""The launcher, which starts a program on n ranks, whichever MPI is installed. `python -m mpi_impl.launch` is its door.

    python -m mpi_impl.launch -n 8 [--timeout SECONDS] -m mpi_impl.pretrain_gpt [options of the program]
    python -m mpi_impl.launch -n 8 [--timeout SECONDS] program.py [options of the program]
    python -m mpi_impl.launch -n 8 --hostfile hosts ...      # on several hosts: hostfile.py has its lines
    python -m mpi_impl.launch -n 8 --max-restarts 3 ...      # start it again if it fails: restarts.py
    python -m mpi_impl.launch -n 8 --mps ...                 # let ranks share a GPU: mps.py

Each MPI, and Slurm, starts ranks by another command with other rules, and the launcher of one with the library of
another quietly gives n worlds of one rank. This program asks mpi4py which library it uses, finds the launcher that
belongs to it, sets what that launcher needs (runtime/mpis.py), and ends all ranks when one fails, when the time
is up, or when it is interrupted or killed itself (guard.py). Its exit status is the job's; 124 when the time was up.
docs/several_hosts.md tells how ranks get to several hosts.

The program should hand its main function to `mpi_impl.launch.entry.run`, which lets no failing rank leave the others
waiting, prints line by line, and refuses a world of another size than -n.
"""
import argparse
import contextlib
import importlib.machinery
import importlib.util
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpi_impl.launch import begin
from mpi_impl.launch.batch import nodes_of_slurm, out_of_reach, suits_srun
from mpi_impl.launch.entry import ASKED_SIZE, LAST_RESORT, ArgumentParser, say
from mpi_impl.launch.guard import Losses, Stops, end_with_parent, exit_on_signals, leaving_nothing, wait
from mpi_impl.launch.hostfile import SSH_OPTIONS, Host, check_reachable, fill_hosts, format_for, read_hosts
from mpi_impl.launch.lifelines import Lifelines
from mpi_impl.launch.mps import check_mps, mps_daemon
from mpi_impl.launch.output import Output, say_lost
from mpi_impl.launch.reports import Reports
from mpi_impl.launch.restarts import RESTARTS, run_with_restarts
from mpi_impl.launch.status import explain
from mpi_impl.runtime.advice import typed
from mpi_impl.runtime.files import LARGEST, check_readable
from mpi_impl.runtime.mpis import DEFAULT, LAUNCHER_NAMES, implementation, names_signals
from mpi_impl.runtime.openblas import kernel_settings
from mpi_impl.runtime.rank_environment import LAUNCHER_VARIABLES, ON_TERMINAL, THREAD_VARIABLES, thread_settings
from reference.errors import UserError

# Variables that ranks on another host need, too: Python's and our cache's paths, settings of a process, our own, and
# the user's settings of MPI's networks, NCCL, CUDA and CuPy.
TRAVELS = re.compile(r"PYTHON|LD_LIBRARY_PATH$|XDG_CACHE_HOME$|GLIBC_TUNABLES$|MALLOC_|SHARDLAB_|UCX_|FI_|NCCL_|CUDA_|"
                     r"CUPY_|" + "|".join(f"{name}$" for name in THREAD_VARIABLES))

RANK_VARIABLES = ",".join(rank for rank, _ in LAUNCHER_VARIABLES)
SECONDS_TO_STOP = 5.0  # that a launcher gets to end its ranks before it is killed
SECONDS_TO_LOOK = 2.0  # between two looks at the launcher's processes
LONGEST = 366 * 86400  # seconds: a longer time limit is a mistake
MOST, MOST_HERE = 100_000, 1_000    # ranks of a job, and those on one machine


def main() -> None:
    start(parse_options())


def start(options: argparse.Namespace) -> None:
    """Start the program that the options name, and end with its status. Raises UserError before anything starts."""
    check_options(options)
    hosts = read_hosts(options.hostfile) if options.hostfile is not None else []
    needed = fill_hosts(hosts, options.n, options.hostfile)
    vendor = mpi_vendor()
    check_reachable(needed)
    run = partial(run_once, options, vendor, time.monotonic())
    sys.exit(run_with_restarts(run, options.n, hosts, options.max_restarts))


def run_once(options: argparse.Namespace, vendor: str, began: float, ranks: int, hosts: Sequence[Host]) -> int:
    """Run the program on ranks of these hosts, or of this machine, to its end. Return its status; no process is left.
    """
    hosts = fill_hosts(hosts, ranks, options.hostfile)
    environment = launch_environment(vendor, ranks, bool(hosts)) | {RESTARTS: str(options.max_restarts)}
    # Each start has a daemon of its own: one whose client has died may be wedged.
    daemon: Any = mps_daemon(ranks) if options.mps else contextlib.nullcontext({})
    with leaving_nothing(), daemon as settings, machinefile(vendor, hosts) as where:
        environment |= settings
        command = [*launcher(vendor, ranks, where), *(export_arguments(vendor, environment) if hosts else [])]
        return supervise([*command, *rank_command(options)], environment, options.timeout, began, limit_of(options))


def rank_command(options: argparse.Namespace) -> list[str]:
    """Return the command of a rank. A program of our own is started without the current folder on Python's path."""
    if is_own(options):
        return own_program(*options.module)
    return [sys.executable, begin.__file__, RANK_VARIABLES, "user", *(
        ["-m", *options.module] if options.module else options.script)]


def limit_of(options: argparse.Namespace) -> float:
    """Return the seconds for which a process of the job may be stopped: a little longer than ranks wait for others."""
    words = " ".join(options.module or options.script)
    given = re.findall(r"--distributed-timeout-minutes[ =](\d*\.?\d+(?:e\d+)?)", words)
    minutes = [10 if is_own(options) else math.inf, *given]
    return 60 * float(minutes[-1]) + LAST_RESORT


def is_own(options: argparse.Namespace) -> bool:
    """Report whether the program is a module of ours, whatever the current folder holds."""
    return options.own or bool(options.module) and options.module[0].startswith(("mpi_impl.", "shardlab."))


def own_program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of ours, as a rank or alone, whatever the current folder holds."""
    return [sys.executable, "-P", begin.__file__, RANK_VARIABLES, "own", "-m", module, *arguments]


def own_job(ranks: int, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of ours on ranks."""
    return own_program("mpi_impl.launch", "-n", str(ranks), "-m", module, *arguments)


def parse_options(argv: Sequence[str] | None = None, prog: str = "mpi_impl.launch") -> argparse.Namespace:
    """Parse a command line; `start` checks what it says. Raises UserError."""
    parser = ArgumentParser(prog=prog, description="Start a program on n ranks, under any MPI. Ctrl-C, SIGTERM and "
                            "SIGHUP end the job. A job that ignores some of them, as in the background of a script or "
                            "under nohup, ends with SIGTERM.")
    add_launch_options(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="the module to run, then its options")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="or the script to run, then its options")
    return parser.parse_args(argv)


def add_launch_options(parser: argparse.ArgumentParser, ranks: int | None = None) -> None:
    """Add the launcher's own options. Without a default number of ranks, -n is required."""
    parser.set_defaults(own=False)      # whether it starts a module of ours
    parser.add_argument("-n", type=int, default=ranks, required=ranks is None, metavar="RANKS",
                        help="how many ranks to start")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the job after this time (status 124)")
    parser.add_argument("--hostfile", metavar="F", help="start them on the hosts of this file, which has lines such as "
                        "`node1 slots=4` or `node1:4`")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="start a job that fails again, at "
                        "most N times, on the hosts that are left: a training run resumes from its last checkpoint")
    parser.add_argument("--mps", action="store_true", help="let ranks that share a GPU of this machine compute on it "
                        "at the same time: NVIDIA's MPS runs as long as the job")


def check_options(options: argparse.Namespace) -> None:
    """Raise UserError for a number, a time limit or a program with which nothing can start."""
    check_ranks(options.n, options.hostfile is not None or nodes_of_slurm() > 1)
    if options.timeout is not None and not 0 < options.timeout <= LONGEST:
        raise UserError(f"--timeout is {options.timeout:g}, but a time limit is a number of seconds above 0, and at "
                        "most a year. Leave it out for no limit.")
    if options.max_restarts < 0:
        raise UserError(f"--max-restarts is {options.max_restarts}, but a job starts again 0 times or more.")
    check_program(options.module, options.script, is_own(options))
    if options.mps:
        check_mps(options.n, options.hostfile)


def check_ranks(n: int, several_hosts: bool) -> None:
    """Refuse a number of ranks that nothing can start: the attempt would take all of the machine."""
    if n < 1:
        raise UserError(f"-n is {n}, but a job needs at least 1 rank.")
    if n > MOST:
        raise UserError(f"-n is {n}, but a job has at most {MOST:,} ranks. Start fewer.")
    if n > MOST_HERE and not several_hosts:
        raise UserError(f"-n is {n}, but at most {MOST_HERE:,} ranks start on one machine. Start fewer, or name the "
                        "hosts of more in a file: --hostfile.")


def check_program(module: list[str] | None, script: list[str], own: bool) -> None:
    """Refuse a program that does not exist before the ranks start: each of them would report it in its own words."""
    if not module and not script:
        raise UserError("There is nothing to run. Name a script, or a module after -m.")
    if module and not module_exists(module[0], [] if own else [os.getcwd()]):
        raise UserError(f"There is no module {module[0]} to run. Check the name after -m, and start this in the folder "
                        "from which it can be imported.")
    if not module and not os.path.exists(script[0]):
        raise UserError(f"There is no script {script[0]} to run. Check its path, or name a module after -m.")
    if not module and not os.path.isdir(script[0]):     # Python runs a folder's __main__.py
        check_readable(script[0], LARGEST)


def module_exists(name: str, folders: Sequence[str]) -> bool:
    """Report whether Python can find the module, in these folders or where it looks for others, without importing it or
    the packages above it.
    """
    package, *submodules = name.split(".")
    try:
        spec = importlib.machinery.PathFinder.find_spec(package, folders) or importlib.util.find_spec(package)
    except ValueError:  # an empty name, and '__main__'
        return False
    for submodule in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return False
        package = f"{package}.{submodule}"
        spec = importlib.machinery.PathFinder.find_spec(package, spec.submodule_search_locations)
    return spec is not None


def mpi_vendor() -> str:
    """Return the name of the MPI library that mpi4py uses. MPI is loaded, but not started."""
    try:
        import mpi4py  # here, so that its absence, too, is a sentence
        mpi4py.rc.initialize = False
        from mpi_impl.comm.mpi_library import library
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
            raise UserError(f"{sys.executable} has no mpi4py: start ranks with that of the project's environment, "
                            "which is .venv/bin/python in a clone after `./run.sh setup`.") from error
        raise UserError(
            f"mpi4py cannot load an MPI library ({error}). Install one into this environment, as in "
            f"`{typed('pip')} install {DEFAULT.wheel}`, or load your system's MPI."
        ) from error
    return library().rsplit(" ", 1)[0]


def launcher(vendor: str, ranks: int, machines: str | None = None) -> list[str]:
    """Return the command that starts ranks of the program after it, on the hosts of a machine file, if given."""
    if machines is None and suits_srun(ranks) and shutil.which("srun"):
        return ["srun", "-n", str(ranks)]
    return [find_mpiexec(vendor), *(["-machinefile", machines] if machines else []), "-n", str(ranks)]


@contextlib.contextmanager
def machinefile(vendor: str, hosts: Sequence[Host]) -> Iterator[str | None]:
    """Write a file with these hosts for this MPI's launcher, and yield its path; None without hosts."""
    if not hosts:
        yield None
        return
    with tempfile.NamedTemporaryFile("w", prefix="shardlab-hosts.") as file:
        file.write(format_for(vendor, hosts))
        file.flush()
        yield file.name


def export_arguments(vendor: str, environment: Mapping[str, str]) -> list[str]:
    """Return the arguments by which ranks on other hosts get these variables. Most MPIs need none."""
    export = implementation(vendor).export
    names = sorted(filter(TRAVELS.match, environment)) if export else []
    return [word for name in names for word in (export, name)]


def find_mpiexec(vendor: str) -> str:
    """Find the mpiexec of this MPI library: the one next to this Python if it fits, else the first such on PATH."""
    folders = dict.fromkeys([str(Path(sys.executable).parent), *os.get_exec_path()])
    mpi, others = implementation(vendor), []
    for name in LAUNCHER_NAMES:
        for folder in folders:
            path = shutil.which(name, path=folder)
            if path and mpi.mark in launcher_version(path):
                return path
            others += [path] if path else []
    found = f"found only {', '.join(dict.fromkeys(others))}, of another MPI" if others else "found none at all"
    raise UserError(
        f"mpi4py uses {vendor}, and its mpiexec is neither next to {sys.executable} nor on PATH: {found}. "
        f"Put {vendor}'s on PATH, or install one with its launcher into this environment, as in "
        f"`{typed('pip')} install {mpi.wheel}`."
    )


def launcher_version(path: str) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout
    return ""


def launch_environment(vendor: str, ranks: int, several_hosts: bool = False) -> dict[str, str]:
    """Return this process's environment variables, and those that launcher and ranks need. The user's take precedence.
    """
    mpi = implementation(vendor)
    settings = {"SLURM_MPI_TYPE": mpi.srun, "SLURM_KILL_BAD_EXIT": "1"}     # srun's: a rank that fails ends the others
    settings |= mpi.settings
    if several_hosts:       # whose ranks choose kernels for their own processor
        settings |= dict.fromkeys(mpi.ssh_options, SSH_OPTIONS)
        settings |= mpi.fill_hosts
    else:
        settings |= kernel_settings()
        if out_of_reach(os.environ) and not any(name in os.environ for name in mpi.ssh_agents + mpi.host_files):
            settings |= mpi.here
    settings |= thread_settings(os.environ)     # a program that imports NumPy first would come too late to set them
    if sys.stdout and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        settings[ON_TERMINAL] = "1"
    settings["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"   # large pages for arrays: fewer misses of the address cache
    settings |= os.environ | {ASKED_SIZE: str(ranks)}
    return {name: value for name, value in settings.items() if name not in mpi.not_inherited}


class JobEnded(Exception):
    """The end of a job by its launcher: the exit status, and why in a sentence."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


def supervise(command: list[str], environment: dict[str, str], timeout: float | None,
              began: float | None = None, limit: float = math.inf) -> int:
    """Run the command to its end, or to ours. Return its exit status, as a shell does. End this process where another
    start could not help. The time limit counts from when the job `began`, or from now; `limit` is the time
    for which a process may be stopped.
    """
    exit_on_signals()
    lifelines = Lifelines() if os.path.basename(command[0]) == "srun" else None
    reports = Reports()
    told = reports.settings | (lifelines.settings if lifelines else {})
    process = subprocess.Popen(command, env=environment | told, start_new_session=True, preexec_fn=end_with_parent,
                               stdout=subprocess.PIPE)
    output = Output(process)
    output.start()
    try:
        status = outcome(process, began or time.monotonic(), timeout or math.inf, limit, reports, lifelines)
    except JobEnded as end:
        stop(process)
        say(f"error: {end}")
        return end.status
    except KeyboardInterrupt:
        stop(process)
        say("Interrupted.")
        return 130
    finally:
        stop(process)
        unprinted, failure = output.finish(), reports.close()
    if unprinted:
        say_lost(unprinted)
        sys.exit(1)
    if failure is not None:     # a rank has said why
        return failure
    say(explain(status, command[0], output.banner, names_signals(launcher_version(command[0]))) if status else "")
    return status if status >= 0 else 128 - status


def outcome(process: subprocess.Popen, began: float, timeout: float, limit: float, reports: Reports,
            lifelines: Lifelines | None) -> int:
    """Wait for the launcher's exit status. Raises JobEnded when the time is up, if the launcher has lost a process, or
    if one of the job has been stopped for too long. If nodes have failed, end this process.
    """
    losses, stops, deadline = Losses(process.pid), Stops(), began + timeout
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return wait(process, min(SECONDS_TO_LOOK, max(0, deadline - time.monotonic())))
        if time.monotonic() >= deadline:
            if places := reports.places():
                say(f"note: at the time limit, ranks were here:\n{places}")
            raise JobEnded(124, f"the job did not end within {timeout:g} seconds (--timeout), and has been ended.")
        if losses.found():
            process.kill()      # it would not notice a request to stop, either
            command: Any = process.args
            raise JobEnded(1, f"a process of the launcher {command[0]}, by which it starts ranks and watches over "
                           "them, has died, and the job has been ended.")
        if lifelines:
            lifelines.accept()
            if lifelines.lost:
                stop(process)
                say(f"error: ranks on {' and '.join(lifelines.lost)} have died without a word, and srun still waits "
                    "for them, as it does when a node fails. The job has been ended; from its last checkpoint a run "
                    "can resume on fewer nodes.")
                sys.exit(1)
        if (reports.folder / begin.SAID).exists():      # by a rank; MPI, if it has started, ends it with the others
            stop(process)
        say(reports.waits())
        for pid in stops.found():
            say(f"note: process {pid} of the job has been stopped by a signal, and the job waits for it. Let it go on "
                f"with `kill -CONT {pid}`, or end the job.")
        for pid in stops.longer_than(limit):
            raise JobEnded(1, f"process {pid} of the job has been stopped by a signal for longer than "
                           "--distributed-timeout-minutes allows, and the job has been ended.")


def stop(process: subprocess.Popen) -> None:
    """End the launcher, which ends its ranks; kill its process group if it does not."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
